"""Tensors that cross from one stage of a pipeline to the next: their shapes, and how they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchfleet.base.errors import ModelError
from torchfleet.collective.world import Axis

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip
_PER_TAG = 256  # tensors of a message that get a tag of their own


class Shape(NamedTuple):
    """The shape and dtype of a tensor that is sent to another stage."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.sizes, dtype=self.dtype, device=device)


def shape_of(output: Any) -> Shape:
    """The shape of an output. Raises ModelError for what cannot be sent: no tensor, or an unsupported dtype."""
    if not isinstance(output, torch.Tensor) or output.dtype not in _DTYPES:
        kind = output.dtype if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(
            f"pipeline: a stage returns {kind}, and only tensors of ordinary types, or tuples of them, can go on to "
            "the next stage"
        )
    return Shape(tuple(output.shape), output.dtype)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


class Transfer(NamedTuple):
    """Tensors that are being sent or received."""

    works: Sequence[Any]
    tensors: Sequence[torch.Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Wire:
    """Sends tensors to other ranks of a pipeline and receives theirs; pairs of ranks do so in the same order."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        """`device`: the one that computes."""
        self._axis, self.computing = axis, device
        # gloo needs host memory; ranks that share a GPU have no other backend.
        self.device = torch.device("cpu") if dist.get_backend(axis.group) == "gloo" else device

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the pipeline."""
        assert self._axis.group is not None
        return dist.get_global_rank(self._axis.group, rank)

    def isend(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Transfer:
        """Start to send. The tensors must live until the send is done. `tag`: unique among the messages under way."""
        sent = [_bytes(tensor.detach().to(self.device)) for tensor in tensors]
        return Transfer(self._post(dist.isend, sent, to, tag), sent)

    def irecv(self, shapes: Sequence[Shape], source: int, tag: int) -> Transfer:
        """Start to receive."""
        tensors = [shape.empty(self.device) for shape in shapes]
        return Transfer(self._post(dist.irecv, [_bytes(tensor) for tensor in tensors], source, tag), tensors)

    def arrived(self, transfer: Transfer) -> list[torch.Tensor]:
        """Wait for received tensors; returns them on the device that computes."""
        transfer.wait()
        return [tensor.to(self.computing) for tensor in transfer.tensors]

    def _post(self, kind: Any, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> list[Any]:
        peer, group, first = self.global_rank(rank), self._axis.group, tag * _PER_TAG
        operations = [dist.P2POp(kind, tensor, peer, group, first + i % _PER_TAG) for i, tensor in enumerate(tensors)]
        return dist.batch_isend_irecv(operations) if operations else []

    # With their shapes, which the receiver does not know yet

    def send_described(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Send shapes and dtypes, as numbers and not as pickles, and then the tensors."""
        numbers: list[int] = [len(tensors)]
        for shape in map(shape_of, tensors):
            numbers += [_DTYPES.index(shape.dtype), len(shape.sizes), *shape.sizes]
        for message in (torch.tensor([len(numbers)]), torch.tensor(numbers), *tensors):
            dist.send(_bytes(message.to(self.device)), self.global_rank(to), self._axis.group)

    def recv_described(self, source: int) -> tuple[list[Shape], list[torch.Tensor]]:
        """Receive the shapes that `send_described` sends, and the tensors."""
        length = self._recv(Shape((1,), torch.int64), source)
        num, *numbers = self._recv(Shape((int(length),), torch.int64), source).tolist()
        shapes: list[Shape] = []
        for _ in range(num):
            dtype, dim = numbers[:2]
            shapes.append(Shape(tuple(numbers[2 : 2 + dim]), _DTYPES[dtype]))
            numbers = numbers[2 + dim :]
        return shapes, [self._recv(shape, source).to(self.computing) for shape in shapes]

    def _recv(self, shape: Shape, source: int) -> torch.Tensor:
        tensor = shape.empty(self.device)
        dist.recv(_bytes(tensor), self.global_rank(source), self._axis.group)
        return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a form that every backend can send: integers and booleans as bytes. Shares memory if contiguous."""
    tensor = tensor.contiguous()
    return tensor if tensor.is_floating_point() else tensor.view(-1).view(torch.uint8)
