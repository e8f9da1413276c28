"""One step of LARS or LAMB on many tensors with a few kernels: the launches and their arguments.

torch's foreach functions pass over memory once per operation. These kernels pass over it twice: once for the norms, and
once for the step, which needs them. Bytes moved per value: LAMB 40 (torch's fused Adam: 28), LARS 28 (torch's fused SGD
with momentum: 20).
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

CHUNK, BLOCK, WARPS = 16384, 1024, 4  # values per program, values at a time, warps
_ALIGNMENT = 16  # bytes that a thread reads at once
_MOST_PLANS = 64


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def are_for_kernels(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels support such parameters, as far as can be told without their gradients."""
    device = parameters[0].device
    return device.type == "cuda" and _has_triton() and {each.dtype for each in parameters} == {torch.float32}


class Plan(NamedTuple):
    """Which program processes which values, for tensors of given sizes; on the device."""

    sizes: torch.Tensor  # of each tensor
    firsts: torch.Tensor  # of each tensor: its first program
    counts: torch.Tensor  # of each tensor: its number of programs
    owners: torch.Tensor  # of each program: its tensor
    starts: torch.Tensor  # of each program: its index among its tensor's programs
    partials: torch.Tensor  # (2, programs)
    states: list[list[int]]  # addresses of states that `launch` has checked

    @staticmethod
    def of(sizes: Sequence[int], device: torch.device, states: list[list[int]]) -> Plan:
        counts = torch.tensor([-(-size // CHUNK) for size in sizes], dtype=torch.int64)
        firsts = counts.cumsum(0) - counts
        owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        starts = torch.arange(len(owners)) - firsts[owners]
        partials = torch.zeros(2, len(owners), device=device)
        numbers = (torch.tensor(sizes, dtype=torch.int64), firsts, counts, owners, starts)
        of_sizes, firsts, counts, owners, starts = (each.to(device) for each in numbers)
        return Plan(of_sizes, firsts, counts, owners, starts, partials, states)


class MultiTensor:
    """The launches of one optimizer. What does not change between steps is made, checked and uploaded once."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}
        self._launches: dict[Any, Launch] = {}  # the last launch of each plan

    def launch(self, rows: Sequence[Sequence[torch.Tensor]]) -> Launch | None:
        """A launch for rows of tensors: weights, gradients, states. None unless all are dense float32 on one GPU."""
        weights, gradients, *states = rows
        if not are_for_kernels(gradients) or not all(map(torch.Tensor.is_contiguous, gradients)):
            return None
        addresses = [list(map(torch.Tensor.data_ptr, row)) for row in rows]
        key = (*addresses[0], *map(torch.Tensor.numel, weights))
        if key not in self._plans or self._plans[key].states != addresses[2:]:
            device = gradients[0].device
            if not all(_is_plain(tensor, device) for tensor in itertools.chain(weights, *states)):
                return None
            if len(self._plans) >= _MOST_PLANS:  # weights whose addresses change in every step
                self._plans.clear()
                self._launches.clear()
            self._plans[key] = Plan.of(key[len(weights) :], device, addresses[2:])
        if key not in self._launches or self._launches[key].addresses != addresses:
            self._launches[key] = Launch(self._plans[key], addresses, gradients[0].device)
        return self._launches[key]


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.dtype is torch.float32 and tensor.device == device and tensor.is_contiguous()


class Launch:
    """Kernels on rows of tensors: weights, gradients, states. `settings` are rows of numbers, one for each tensor.

    The host does not wait. The tensors must stay alive until the device has used them, as with all of torch's
    functions.
    """

    def __init__(self, plan: Plan, addresses: list[list[int]], device: torch.device) -> None:
        self.addresses = addresses
        self._plan, self._num, self._device = plan, len(addresses[0]), device
        flat = list(itertools.chain(*addresses))
        self._is_aligned = not any(address % _ALIGNMENT for address in flat)
        self._addresses = _uploaded(flat, torch.int64, device)
        self._given: tuple[Sequence[float], ...] = ()
        self._settings = torch.empty(0)

    def use(self, *settings: Sequence[float]) -> None:
        if settings != self._given:
            self._given = settings
            self._settings = _uploaded(list(itertools.chain(*settings)), torch.float32, self._device)

    def lamb_moments(self, betas: tuple[float, float], eps: float) -> torch.Tensor:
        """Update m and v; returns ‖p‖² and ‖r‖², (2, tensors)."""
        from torchfleet.collective.strategies.layerwise.multi_tensor_kernels import lamb_moments

        plan, (first, second) = self._plan, betas
        lamb_moments[self._grid](
            self._addresses, self._settings, plan.sizes, plan.owners, plan.starts, plan.partials, self._num,
            len(plan.owners), first, 1 - first, second, 1 - second, eps,
            CHUNK, BLOCK, self._is_aligned, num_warps=WARPS,
        )  # fmt: skip
        return self._squares()

    def lamb_step(self, rates: torch.Tensor, eps: float) -> None:
        """p = p - rate · r."""
        from torchfleet.collective.strategies.layerwise.multi_tensor_kernels import lamb_step

        plan = self._plan
        lamb_step[self._grid](
            self._addresses, self._settings, plan.sizes, plan.owners, plan.starts, rates.contiguous(), self._num, eps,
            CHUNK, BLOCK, self._is_aligned, num_warps=WARPS,
        )  # fmt: skip

    def lars_squares(self) -> torch.Tensor:
        """‖p‖² and ‖g‖², (2, tensors)."""
        from torchfleet.collective.strategies.layerwise.multi_tensor_kernels import lars_squares

        plan = self._plan
        lars_squares[self._grid](
            self._addresses, plan.sizes, plan.owners, plan.starts, plan.partials, self._num, len(plan.owners),
            CHUNK, BLOCK, self._is_aligned, num_warps=WARPS,
        )  # fmt: skip
        return self._squares()

    def lars_step(self, rates: torch.Tensor, momentum: float) -> None:
        """v = momentum · v + rate · (g + decay · p), p = p - v."""
        from torchfleet.collective.strategies.layerwise.multi_tensor_kernels import lars_step

        plan = self._plan
        lars_step[self._grid](
            self._addresses, self._settings, plan.sizes, plan.owners, plan.starts, rates.contiguous(), self._num,
            momentum, CHUNK, BLOCK, self._is_aligned, num_warps=WARPS,
        )  # fmt: skip

    @property
    def _grid(self) -> tuple[int]:
        return (len(self._plan.owners),)

    def _squares(self) -> torch.Tensor:
        from torchfleet.collective.strategies.layerwise.multi_tensor_kernels import total_squares

        plan = self._plan
        squares = plan.partials.new_empty(2, self._num)
        total_squares[(self._num,)](
            plan.partials, plan.firsts, plan.counts, squares, self._num, len(plan.owners), BLOCK
        )
        return squares


def _uploaded(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Upload through pinned memory, without waiting."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
