"""A worker's progress through its data: finished epochs, and the time left in the current one."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, Literal

Unit = Literal["samples", "batches"]
_RECENT = 30.0  # the time left follows from the speed over this many seconds, or
_SHARE = 0.25  # over this share of the epoch if that is longer, so that the estimate of a long epoch is steady
_NUM_LOOKS = 60  # measurements kept of this period


class Epoch:
    """One pass over data. It counts as a training epoch once a step is made in it."""

    def __init__(self, total: Callable[[], int | None], unit: Unit, started: float, first_step: int) -> None:
        self.total, self.unit, self.started, self.first_step = total, unit, started, first_step
        self.done = 0  # samples or batches so far
        self.values: Mapping[str, Any] = {}  # the values of the last step
        self._looks: deque[tuple[float, int]] = deque()  # (time, number done)

    def seconds_each(self, now: float) -> float | None:
        """Seconds per unit, measured recently: the first step compiles and connects, and is not representative."""
        if not self.done:
            return None
        window, looks = max(_RECENT, _SHARE * (now - self.started)), self._looks
        while len(looks) > 1 and now - looks[1][0] >= window:
            looks.popleft()
        then, before = looks[0] if looks and self.done > looks[0][1] else (self.started, 0)
        if not looks or now - looks[-1][0] >= window / _NUM_LOOKS:
            looks.append((now, self.done))
        return (now - then) / (self.done - before)


class Epochs:
    """The epochs of a worker. `num_steps` returns the steps made so far, which tells training from evaluation."""

    def __init__(self, num_steps: Callable[[], int], now: Callable[[], float] = time.monotonic) -> None:
        self._num_steps, self._now = num_steps, now
        self._open: list[Epoch] = []
        self._last: dict[str, Any] = {}
        self._num_over = 0  # finished training epochs
        self._num_planned: int | None = None  # the number that the script has announced

    def plan(self, num: int, start: int = 0) -> None:
        """Announce `num` epochs in total. The next one has the number `start`."""
        self._num_over, self._num_planned = start, num

    @contextlib.contextmanager
    def begin(self, total: Callable[[], int | None], unit: Unit) -> Iterator[Epoch]:
        """Begin an epoch. `total` returns the number of units in it, as far as known at the time of the call."""
        epoch = Epoch(total, unit, self._now(), self._num_steps())
        self._open.append(epoch)
        try:
            yield epoch
        finally:
            if self._is_training(epoch):
                self._last = self._status(epoch)
                self._num_over += 1
            self._open.remove(epoch)

    def status(self) -> dict[str, Any]:
        """The status of the current training epoch, or else of the previous one; empty before the first."""
        epoch = self.current
        return self._last if epoch is None else self._status(epoch)

    @property
    def current(self) -> Epoch | None:
        """The current training epoch."""
        return next((epoch for epoch in reversed(self._open) if self._is_training(epoch)), None)

    def _is_training(self, epoch: Epoch) -> bool:
        return self._num_steps() > epoch.first_step

    def _status(self, epoch: Epoch) -> dict[str, Any]:
        total, num = epoch.total(), self._num_planned
        found: dict[str, Any] = {"epoch": self._num_over, "done": epoch.done, "unit": epoch.unit}
        if num is not None and num > self._num_over:
            found["epochs"] = num
        if total is not None:
            found["total"] = max(total, epoch.done)
            if (seconds := epoch.seconds_each(self._now())) is not None:
                more = total * (found.get("epochs", 1 + self._num_over) - self._num_over - 1)
                found["eta_s"] = round(seconds * (max(0, total - epoch.done) + more), 1)
        return found


def length(loader: object) -> int | None:
    """The number of batches of a loader; None if it does not define one."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):  # a DataLoader over a stream has __len__, which raises
        return None
