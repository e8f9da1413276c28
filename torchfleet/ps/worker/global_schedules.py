"""For geo training, where each worker makes its own steps: schedulers that count the steps of all workers."""

from __future__ import annotations

import copyreg
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_MOST_FRUITLESS = 3
_counts: weakref.WeakKeyDictionary[Any, Count] = weakref.WeakKeyDictionary()  # by scheduler
_kinds: dict[type[Any], type[Any]] = {}  # subclasses that count, by the class of a scheduler


class Count:
    """Decides by how many steps one call of a scheduler's `step` advances it."""

    def __init__(self, num_workers: Callable[[], int], num_made: Callable[[], int] | None = None) -> None:
        """`num_made`: the number of steps that the optimizer has made; None: every call counts for all workers."""
        self._num_workers, self._num_made = num_workers, num_made
        self._seen = num_made() - 1 if num_made is not None else 0  # made by the optimizer before the last call
        self._num_calls = 0  # since the optimizer's last step

    def of_call(self) -> int:
        """The number of workers for a scheduler that is called after every step of the optimizer; 1 for a scheduler
        that is called after several steps, such as an epoch. Further calls after the same step come from a script that
        counts for all workers by itself: each is 0 until there have been more calls than workers, and 1 from then on.
        """
        num_workers = self._num_workers()
        if self._num_made is None:
            return num_workers
        made = self._num_made() - self._seen
        self._seen += made
        self._num_calls = 1 if made else self._num_calls + 1
        if made == 1:
            return num_workers
        return 1 if made or self._num_calls > num_workers else 0


class GlobalSchedules:
    """Lets all schedulers of an optimizer count the steps of all workers, if they advance with every step.

    torch keeps no list of an optimizer's schedulers. This searches all objects for them, at the first step after a
    scheduler has set `initial_lr` in the param groups, and again when a learning rate has changed although no known
    scheduler has advanced.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_workers: int) -> None:
        self._optimizer, self._num_workers = optimizer, num_workers
        self._num_made = 0
        self._found: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_fruitless = 0  # searches that found nothing new: the script sets rates by itself
        self._before: Any = None  # learning rates, and what the known schedulers have counted

    def step_made(self) -> None:
        """Called after each step of the optimizer, before schedulers advance."""
        self._num_made += 1
        groups = self._optimizer.param_groups
        if not any("initial_lr" in group for group in groups):
            return
        rates = [float(group["lr"]) for group in groups]
        counted = [getattr(scheduler, "last_epoch", 0) for scheduler in self._found]
        is_news = self._before is None or (rates != self._before[0] and counted == self._before[1])
        if is_news and self._num_fruitless < _MOST_FRUITLESS:
            num_before = len(self._found)
            self._search(groups)
            self._num_fruitless += len(self._found) == num_before
            counted = [getattr(scheduler, "last_epoch", 0) for scheduler in self._found]
        self._before = rates, counted

    def _search(self, groups: list[dict[str, Any]]) -> None:
        found = _schedulers_of(groups)
        inner = {id(nested) for scheduler in found for nested in _nested(scheduler)}
        for scheduler in found:
            self._found.add(scheduler)
            if scheduler not in _counts and id(scheduler) not in inner and not isinstance(scheduler, ReduceLROnPlateau):
                count_globally(scheduler, lambda: self._num_workers, lambda: self._num_made)


def count_globally(scheduler: Any, num_workers: Callable[[], int], num_made: Callable[[], int] | None = None) -> None:
    """Let every call of `scheduler.step` advance it as Count says. A call with an argument is left as it is.

    The scheduler gets a subclass of its class: an attribute of its own would become part of its state_dict.
    """
    _counts[scheduler] = Count(num_workers, num_made)
    if not getattr(type(scheduler), "counts_globally", False):
        kind = type(scheduler)
        scheduler.__class__ = _kinds.get(kind) or _kinds.setdefault(kind, _counting(kind))


def _counting(kind: type[Any]) -> type[Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        count = _counts.get(self)
        num = 1 if count is None or args or kwargs else count.of_call()
        if hasattr(self, "total_steps"):  # workers round their shares up, and together may make a few steps more
            num = min(num, max(1, self.total_steps - self.last_epoch))
        for _ in range(num):
            kind.step(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Pickled as an object of the scheduler's own class."""
        return copyreg.__newobj__, (kind,), self.__dict__  # type: ignore[attr-defined]

    members = {
        "step": step,
        "counts_globally": True,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)


def _schedulers_of(groups: list[dict[str, Any]]) -> list[LRScheduler]:
    # By type, not by isinstance: that would read __class__ of arbitrary objects, and some raise an error.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    return [scheduler for scheduler in found if getattr(_optimizer(scheduler), "param_groups", None) is groups]


def _optimizer(scheduler: LRScheduler) -> Any:
    return getattr(scheduler, "optimizer", None)  # missing while it is being constructed


def _nested(scheduler: Any) -> list[Any]:
    """The schedulers that a scheduler contains (SequentialLR, ChainedScheduler), at any depth."""
    return [found for inner in getattr(scheduler, "_schedulers", ()) for found in (inner, *_nested(inner))]
