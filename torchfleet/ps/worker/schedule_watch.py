"""Detects schedulers that count one worker's steps where those of all workers were meant: geo training."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_ENOUGH = 4  # consecutive optimizer steps, each with a scheduler step: the scheduler advances per batch


class ScheduleWatch:
    """Reports once on stderr that a torch scheduler advances per batch and was not passed to
    fleet.distributed_scheduler. Schedulers that advance per epoch are ignored.

    torch keeps no list of an optimizer's schedulers. This searches all objects for them, once: at the first step after
    a scheduler has set `initial_lr` in the param groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_workers: int, wrapped: Sequence[Any]) -> None:
        """`wrapped`: the schedulers passed to fleet.distributed_scheduler; the list may still grow."""
        self._optimizer, self._num_workers, self._wrapped = optimizer, num_workers, wrapped
        self._found: list[Steps] | None = None
        self._is_over = False

    def step_made(self) -> None:
        """Called after each step of the optimizer."""
        if self._is_over:
            return
        groups = self._optimizer.param_groups
        if self._found is None:
            if any("initial_lr" in group for group in groups):
                self._found = [Steps(scheduler) for scheduler in _schedulers_of(groups)]
            return
        scaled = {id(scheduler) for wrapped in self._wrapped for scheduler in _with_nested(wrapped)}
        for steps in self._found:
            if steps.in_a_row(self._num_workers) >= _ENOUGH and steps.identity not in scaled:
                self._is_over = True
                self._tell(steps.name)
                return

    def _tell(self, name: str) -> None:
        num = self._num_workers
        print(
            f"geo training with {num} workers: {name} advances with every batch of this worker, so it counts 1 of "
            f"{num} steps and takes {num} times as long as in one process. Write scheduler = "
            "fleet.distributed_scheduler(scheduler); a scheduler that advances per epoch stays as it is.",
            file=sys.stderr,
            flush=True,
        )


class Steps:
    """The progress of a scheduler. Does not keep it alive."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = weakref.ref(scheduler)
        self.name, self.identity = type(scheduler).__name__, id(scheduler)
        self._last, self._num = _count(scheduler), 0

    def in_a_row(self, num_workers: int) -> int:
        """The number of consecutive optimizer steps, up to this one, at which the scheduler advanced by one.

        A scheduler that advances by one step per worker counts global steps: the script scales it by itself.
        """
        scheduler = self._scheduler()
        now = self._last if scheduler is None else _count(scheduler)
        self._num = self._num + 1 if 0 < now - self._last < num_workers else 0
        self._last = now
        return self._num


def _schedulers_of(groups: list[dict[str, Any]]) -> list[LRScheduler]:
    # By type, not by isinstance: that would read __class__ of arbitrary objects, and some raise an error.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    return [scheduler for scheduler in found if getattr(_optimizer(scheduler), "param_groups", None) is groups]


def _optimizer(scheduler: LRScheduler) -> Any:
    return getattr(scheduler, "optimizer", None)  # missing while it is being constructed


def _count(scheduler: LRScheduler) -> int:
    return int(getattr(scheduler, "last_epoch", 0))


def _with_nested(scheduler: Any) -> list[Any]:
    """A scheduler, and those that it contains (SequentialLR, ChainedScheduler)."""
    nested = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(inner for outer in nested for inner in _with_nested(outer))]
