"""Pipeline schedules: the order in which a stage computes its micro-batches, and the tensors it sends and receives.

The schedules of torch.distributed.pipelining are not used: over gloo those of torch 2.6 and 2.7 lose tensors, those of
2.9 to 2.11 cannot start (those of 2.13 do), and they learn shapes from pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchfleet.base.errors import ModelError
from torchfleet.collective.pipeline.micro_batches import MicroBatches
from torchfleet.collective.world import Axis

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip


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


def order(mode: str, rank: int, size: int, num: int, has_loss: bool) -> Iterator[tuple[bool, int]]:
    """(is it forward, which micro-batch): what a stage computes, in order.

    "1F1B": first as many forwards as there are stages from this one on, then alternately a backward and a forward.
    """
    if not has_loss:
        yield from ((True, index) for index in range(num))
        return
    ahead = min(num, size - rank) if mode == "1F1B" else num
    yield from ((True, index) for index in range(ahead))
    for index in range(num):
        yield False, index
        if index + ahead < num:
            yield True, index + ahead


class Schedule:
    """What this rank's stage does for batches of one shape: `call` computes the stage for one micro-batch."""

    def __init__(
        self,
        call: Callable[[Sequence[torch.Tensor], Any], Any],
        crossing: tuple[Sequence[Shape], Sequence[Shape]],
        axis: Axis,
        device: torch.device,
        mode: str,
    ) -> None:
        self._call, self._axis, self._device, self._mode = call, axis, device, mode
        self._wire_device = wire_device(axis, device)
        self._incoming, self._outgoing = crossing
        self._is_last = axis.rank == axis.size - 1
        self._sends: list[dist.P2POp] = []  # finished results, posted together with the next receive
        self._kept: dict[int, tuple[Sequence[torch.Tensor], tuple[Any, ...]]] = {}  # between forward and backward

    def run(self, batches: MicroBatches, before_last: Callable[[], object] = lambda: None) -> None:
        """Run all micro-batches, with backward if they have a loss. Ranks of the pipeline call it together.

        `before_last` is called before the last backward pass, which completes the gradients.
        """
        self._kept.clear()  # of an aborted batch
        self._sends = []
        for is_forward, index in order(self._mode, self._axis.rank, self._axis.size, batches.num, batches.has_loss):
            if is_forward:
                self._forward(index, batches)
            else:
                if index == batches.num - 1:
                    before_last()
                self._backward(index)
        self._exchange([], 0)

    def _forward(self, index: int, batches: MicroBatches) -> None:
        received = self._exchange(self._incoming, -1)
        for tensor in received:
            tensor.requires_grad_(batches.has_loss and tensor.is_floating_point())
        outputs = self._call(received, batches.next_inputs())
        if self._is_last:
            if batches.has_loss:
                self._kept[index] = received, (batches.loss(outputs),)
            else:
                batches.outputs.append(outputs)
            return
        sent = as_tuple(outputs)
        self._check(sent)
        self._sends = [self._op(dist.isend, tensor.detach(), 1) for tensor in sent]
        if batches.has_loss:
            self._kept[index] = received, sent

    def _backward(self, index: int) -> None:
        gradients: Sequence[torch.Tensor | None] = self._exchange(_differentiable(self._outgoing), 1)
        received, outputs = self._kept.pop(index)
        if self._is_last:
            gradients = [None]
        else:
            outputs = tuple(output for output in outputs if output.is_floating_point())
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        back = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in received
            if tensor.is_floating_point()
        ]
        self._sends = [self._op(dist.isend, gradient, -1) for gradient in back]

    def _check(self, outputs: tuple[Any, ...]) -> None:
        found = [shape_of(output) for output in outputs]
        if found != list(self._outgoing):
            raise ModelError(
                f"pipeline: stage {self._axis.rank} returned {[tuple(shape.sizes) for shape in self._outgoing]} for "
                f"one micro-batch and {[tuple(shape.sizes) for shape in found]} for another of the same shape"
            )

    def _exchange(self, shapes: Sequence[Shape], step: int) -> list[torch.Tensor]:
        """Send what is waiting, and receive from the previous (-1) or next (1) stage.

        All operations are posted as one batch, so that no two stages wait for each other."""
        received = [shape.empty(self._wire_device) for shape in shapes]
        operations = [*self._sends, *(self._op(dist.irecv, tensor, step) for tensor in received)]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        self._sends = []
        return [tensor.to(self._device) for tensor in received]

    def _op(self, kind: Callable[..., Any], tensor: torch.Tensor, step: int) -> dist.P2POp:
        return dist.P2POp(kind, _wire(tensor.to(self._wire_device)), neighbour(self._axis, step), self._axis.group)


def _differentiable(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape for shape in shapes if shape.dtype.is_floating_point]


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a form that every backend can send: integers and booleans as bytes. Shares memory if contiguous."""
    tensor = tensor.contiguous()
    return tensor if tensor.is_floating_point() else tensor.view(-1).view(torch.uint8)


def wire_device(axis: Axis, device: torch.device) -> torch.device:
    """The device for sends and receives. gloo needs host memory; ranks that share a GPU have no other backend."""
    return torch.device("cpu") if dist.get_backend(axis.group) == "gloo" else device


def neighbour(axis: Axis, step: int) -> int:
    """The global rank of the stage `step` further."""
    assert axis.group is not None
    return dist.get_global_rank(axis.group, axis.rank + step)


# Shapes of what is sent, learned from one micro-batch


def send_described(tensors: Sequence[torch.Tensor], axis: Axis, device: torch.device) -> None:
    """Send shapes and dtypes to the next stage, as numbers and not as pickles, and then the tensors once."""
    numbers: list[int] = [len(tensors)]
    for shape in map(shape_of, tensors):
        numbers += [_DTYPES.index(shape.dtype), len(shape.sizes), *shape.sizes]
    to, wire = neighbour(axis, 1), wire_device(axis, device)
    for message in (torch.tensor([len(numbers)]), torch.tensor(numbers)):
        dist.send(message.to(wire), to, axis.group)
    for tensor in tensors:
        dist.send(_wire(tensor.to(wire)), to, axis.group)


def recv_described(axis: Axis, device: torch.device) -> tuple[list[Shape], list[torch.Tensor]]:
    """Receive the shapes that the previous stage sends, and the tensors."""
    source, wire = neighbour(axis, -1), wire_device(axis, device)
    length = torch.empty(1, dtype=torch.int64, device=wire)
    dist.recv(length, source, axis.group)
    message = torch.empty(int(length), dtype=torch.int64, device=wire)
    dist.recv(message, source, axis.group)
    num, *numbers = message.tolist()
    shapes: list[Shape] = []
    for _ in range(num):
        dtype, dim = numbers[:2]
        shapes.append(Shape(tuple(numbers[2 : 2 + dim]), _DTYPES[dtype]))
        numbers = numbers[2 + dim :]
    tensors = [shape.empty(wire) for shape in shapes]
    for tensor in tensors:
        dist.recv(_wire(tensor), source, axis.group)
    return shapes, [tensor.to(device) for tensor in tensors]
