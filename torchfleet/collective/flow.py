"""How micro-batches flow through the stages of a pipeline: what crosses from rank to rank, by torch's schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from torchfleet.collective.micro_batches import MicroBatches
from torchfleet.collective.world import Axis
from torchfleet.errors import ModelError

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip


class Shape(NamedTuple):
    """Of a tensor that crosses: everything but its values."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.dtype if self.dtype.is_floating_point else torch.float64

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """As it travels; it wants a gradient, because everything that crosses gets one."""
        return torch.empty(self.sizes, dtype=self.wire_dtype, device=device, requires_grad=True)


def to_wire(tensor: Any) -> torch.Tensor:
    """Integers and truth values travel as their bits, called floats: a gradient comes back for every tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ModelError(
            f"pipeline: a stage returns {kind}, and only tensors of ordinary types, or tuples of them, can go on to "
            "the next stage"
        )
    if tensor.dtype.is_floating_point:
        return tensor.contiguous()
    return tensor.long().contiguous().view(torch.float64)


def from_wire(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return tensor
    if tensor.requires_grad:
        tensor.grad = torch.zeros_like(tensor)  # nothing will come back through integers
    return tensor.detach().view(torch.int64).to(dtype)


def announce(tensors: Sequence[Any], axis: Axis, device: torch.device) -> None:
    """Tell the next stage of the axis what will come, and send it once. No pickles: sizes and types are numbers."""
    numbers: list[int] = [len(tensors)]
    for tensor in tensors:
        to_wire(tensor)  # so that it is refused here
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    to = _global_rank(axis, axis.rank + 1)
    for message in (torch.tensor([len(numbers)]), torch.tensor(numbers)):
        dist.send(message.to(device), to, axis.group)
    for tensor in tensors:
        dist.send(to_wire(tensor).detach(), to, axis.group)


def hear(axis: Axis, device: torch.device) -> tuple[list[Shape], list[torch.Tensor]]:
    """What the stage before announces, and the tensors themselves, as they travel."""
    source = _global_rank(axis, axis.rank - 1)
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(length, source, axis.group)
    message = torch.empty(int(length), dtype=torch.int64, device=device)
    dist.recv(message, source, axis.group)
    numbers = message.tolist()
    num, numbers = numbers[0], numbers[1:]
    shapes: list[Shape] = []
    for _ in range(num):
        dtype, dim = numbers[:2]
        shapes.append(Shape(tuple(numbers[2 : 2 + dim]), _DTYPES[dtype]))
        numbers = numbers[2 + dim :]
    tensors = [shape.empty(device).detach() for shape in shapes]
    for tensor in tensors:
        dist.recv(tensor, source, axis.group)
    return shapes, tensors


def _global_rank(axis: Axis, rank: int) -> int:
    assert axis.group is not None
    return dist.get_global_rank(axis.group, rank)


class Way(torch.nn.Module):
    """The way of batches of one shape through this rank's stage.

    torch's schedule calls it for every micro-batch, in their order, with what came from the stage before. The model is
    not registered in it: the schedule would divide the gradients, also those of batches gathered before.
    """

    def __init__(
        self,
        call: Callable[[Sequence[torch.Tensor], Any], Any],
        crossing: tuple[Sequence[Shape], Sequence[Shape]],
        axis: Axis,
        device: torch.device,
        batches: MicroBatches,
        mode: str,
    ) -> None:
        super().__init__()
        self._call, self._device = call, device
        self._incoming, outgoing = crossing
        self._is_first, self._is_last = axis.rank == 0, axis.rank == axis.size - 1
        self._batches = batches
        number = torch.empty(1, dtype=torch.int64, device="meta")
        stage = _Stage(
            self,
            axis.rank,
            axis.size,
            device,
            # All of it said, so that torch need not find out, which it does with pickles.
            input_args=(number,) if self._is_first else tuple(shape.empty("meta") for shape in self._incoming),
            output_args=(torch.empty(1, device="meta"),)
            if self._is_last
            else tuple(shape.empty("meta") for shape in outgoing),
            group=axis.group,
        )
        # torch's 1F1B wants as many micro-batches as stages; with fewer there is none left to run after a backward.
        is_1f1b = mode == "1F1B" and batches.has_loss and batches.num >= axis.size
        schedule = Schedule1F1B if is_1f1b else ScheduleGPipe
        self._schedule = schedule(stage, batches.num, (lambda loss, _: loss[0]) if batches.has_loss else None)

    def run(self, batches: MicroBatches) -> None:
        """All micro-batches, backward too if they have a loss. Ranks of the pipeline call it together."""
        self._batches = batches
        numbers = torch.arange(batches.num)  # in the place of inputs and targets, which are not cut up by torch
        args = (numbers,) if self._is_first else ()
        self._schedule.step(*args, target=numbers if self._is_last and batches.has_loss else None)

    def forward(self, *wires: torch.Tensor) -> Any:
        received = [] if self._is_first else [
            from_wire(wire, shape.dtype) for wire, shape in zip(wires, self._incoming, strict=True)
        ]  # fmt: skip
        outputs = self._call(received, self._batches.next_inputs())
        if not self._is_last:
            return tuple(to_wire(one) for one in as_tuple(outputs))
        if self._batches.has_loss:
            return torch.stack([self._batches.loss(outputs)]).float()  # no view: old schedules detach it in place
        self._batches.outputs.append(outputs)
        return torch.zeros(1, device=self._device)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


class _Stage(PipelineStage):
    """torch 2.9 to 2.11 begin by sending 8 bytes where they wait for 4, which gloo refuses. It needs no beginning."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        if dist.get_backend(self.group) == "gloo":
            return []
        return super()._get_init_p2p_neighbors_ops()


class _All:
    """Several pieces of communication, waited for together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _mend_schedules() -> None:
    """torch before 2.8 waits for the last of several sends and receives alone, which over gloo loses the others."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
        old: Any = schedules
        old._batch_p2p = lambda ops, desc=None: _All(dist.batch_isend_irecv(ops)) if ops else None


_mend_schedules()
