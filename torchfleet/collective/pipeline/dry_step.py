"""A dry step: one micro-batch through the parts of a model, one part after another, to measure time and memory.

Each part computes forward and backward by itself, on the rank's device, on tensors that stand in for its own. So no
device holds more than one part, a model may have no memory yet (it is then measured with random values), and its
parameters, gradients and running statistics and the random state stay as they were.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call

from torchfleet.base.errors import ModelError
from torchfleet.collective.pipeline.stage_cuts import Unit
from torchfleet.collective.tensors.kept_tensors import Storages, bytes_in, kept_for_backward, storage_of
from torchfleet.collective.tensors.outputs import map_tensors, tensors

_ROUNDS = 3  # that are timed; the least time counts
_STD = 0.02  # of values for a model without memory

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class ModelPart(NamedTuple):
    """A part of a model that can run by itself."""

    name: str
    module: torch.nn.Module  # has the tensors of the part
    state: float  # bytes of its parameters, gradients and optimizer state
    call: Callable[[Any, Inputs], Any]  # of the previous part's output and the model's inputs
    is_start: bool | None = None  # whether a stage may begin with it; None: if one tensor enters


class _Round(NamedTuple):
    """Forward and backward of a part."""

    seconds: float
    entering: list[torch.Tensor]  # copies of the tensors that the previous part returned
    output: Any
    kept: Storages  # for backward


class DryStep:
    """Measures parts for a micro-batch on a device. `precision`: that of autocast; None: it is off."""

    def __init__(self, device: torch.device, precision: torch.dtype | None) -> None:
        self._device, self._precision = device, precision

    def measure(self, parts: Sequence[ModelPart], inputs: Inputs) -> list[Unit]:
        """A unit for each part. `inputs`: of one micro-batch, on the device. Raises ModelError if a part cannot run."""
        found: list[Unit] = []
        value: Any = None
        before: set[int] = set()  # storages in `value` that are kept already
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            for part in parts:
                try:
                    done = self._run(part, value, inputs)
                except Exception as error:
                    raise ModelError(
                        f"pipeline_configs['cut']='measured': module {part.name!r} cannot run in the dry step: "
                        f"{type(error).__name__}: {error}. The dry_batch of fleet.distributed_model must be as the "
                        "inputs of train_batch."
                    ) from error
                inherited = {
                    storage_of(copy)
                    for copy, given in zip(done.entering, tensors(value), strict=True)
                    if storage_of(given) in before
                }
                found.append(_unit(part, value, done, inherited))
                value, before = done.output, {*done.kept, *inherited}
        return found

    def _run(self, part: ModelPart, value: Any, inputs: Inputs) -> _Round:
        """Run a part once for what it keeps, then _ROUNDS times for the least time. Returns one round with both."""
        own = {f"part.{name}": tensor for name, tensor in self._stand_ins(part.module)}
        leaves = [tensor for tensor in own.values() if tensor.requires_grad]

        def once() -> _Round:
            received = map_tensors(_leaf, value)
            needing = [*leaves, *(tensor for tensor in tensors(received) if tensor.requires_grad)]
            entering = map_tensors(torch.clone, received)  # may be changed in place, as inside of a stage
            start = self._clock()
            with self._autocast():
                output = part.call(entering, inputs)
            _backward(output, needing)
            seconds = self._clock() - start
            return _Round(seconds, list(tensors(entering)), map_tensors(torch.Tensor.detach, output), {})

        def rounds() -> _Round:
            with kept_for_backward([*own.values(), *tensors(inputs)]) as kept:
                first = once()
            return first._replace(kept=kept, seconds=min(once().seconds for _ in range(_ROUNDS)))

        # Backward runs inside too, because it runs recomputed modules again.
        found: _Round = functional_call(_Around(part.module), own, (rounds,))
        return found

    def _stand_ins(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in module.named_parameters():
            yield name, self._here(parameter).detach().requires_grad_(parameter.requires_grad)
        for name, buffer in module.named_buffers():
            yield name, self._here(buffer).detach().clone()

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return tensor.to(self._device)
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
        return made.normal_(std=_STD) if isinstance(tensor, torch.nn.Parameter) and made.is_floating_point() else made

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._precision)

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Around(torch.nn.Module):
    """Calls a function while the tensors of a part are replaced."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, function: Callable[[], _Round]) -> _Round:
        return function()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, as a stage gets them from another rank."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _backward(output: Any, leaves: Sequence[torch.Tensor]) -> None:
    """Compute the gradients of the leaves, and discard them."""
    needing = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if needing and leaves:
        torch.autograd.grad(needing, leaves, [torch.ones_like(tensor) for tensor in needing], allow_unused=True)


def _unit(part: ModelPart, value: Any, done: _Round, inherited: set[int]) -> Unit:
    """`inherited`: storages that enter the part, and that earlier parts keep."""
    entering = {storage_of(tensor): tensor for tensor in done.entering}
    leaving = [tensor for tensor in tensors(done.output) if storage_of(tensor) not in {*done.kept, *entering}]
    is_start = value is None or isinstance(value, torch.Tensor) if part.is_start is None else part.is_start
    is_changed = any(tensor._version for tensor in done.entering)  # tensors that another rank has sent must not be
    return Unit(
        part.name,
        done.seconds,
        part.state,
        inside=bytes_in(tensor for place, tensor in done.kept.items() if place not in entering),
        entering=bytes_in(entering.values()),
        joined=bytes_in(t for place, t in entering.items() if place in done.kept and place not in inherited),
        leaving=bytes_in(leaving),
        is_start=is_start and not is_changed,
    )
