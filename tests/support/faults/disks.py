"""A disk in virtual time: slow, full, and without what was not yet on it when the power went."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from support.faults.virtual_world import World

from torchfleet.net.wire import Frame


class Disk:
    """The entries of one server. `is_safe_when_written`: a crash is the end of a process, not of the power."""

    def __init__(self, world: World, on_written: Callable[[], None], is_safe_when_written: bool) -> None:
        self._world, self._on_written = world, on_written
        self.is_safe_when_written = is_safe_when_written
        self.kept: list[list[bytes]] = []  # entries that survive a crash
        self._pending: deque[tuple[int, Sequence[Frame]]] = deque()
        self.safe = 0  # the index up to which that is said
        self.delay = 0.004  # seconds, the mean
        self.full_until = 0.0
        self._is_writing = False

    def write(self, index: int, frames: Sequence[Frame]) -> None:
        self._pending.append((index, frames))
        self._write_later()

    def lose(self, dice: random.Random) -> None:
        """A crash: what had not been written is gone, but some of it may be on the disk all the same."""
        for _ in range(dice.randint(0, len(self._pending))):
            self._keep()
        self._pending.clear()
        self._is_writing = False

    @property
    def is_full(self) -> bool:
        return self._world.now < self.full_until

    def _write_later(self) -> None:
        if not self._is_writing and self._pending:
            self._is_writing = True
            pending = self._pending
            self._world.after(self._world.dice.expovariate(1 / self.delay), lambda: self._write(pending))

    def _write(self, pending: object) -> None:
        if pending is not self._pending or not self._is_writing:
            return
        self._is_writing = False
        if self.is_full:
            self._world.at(self.full_until, self._write_later)
            return
        for _ in range(len(self._pending)):
            self._keep()
        self._on_written()

    def _keep(self) -> None:
        index, frames = self._pending.popleft()
        self.kept.append([bytes(memoryview(frame).cast("B")) if memoryview(frame).nbytes else b"" for frame in frames])
        self.safe = index


class DiskSink:
    """As Sink."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.last = 0

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        self.last = index
        self._disk.write(index, entry)

    def confirmed(self) -> int:
        return self._disk.safe

    def trouble(self) -> str:
        return "The disk is full." if self._disk.is_full else ""

    def close(self) -> None:
        pass
