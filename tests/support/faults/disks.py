"""A disk in virtual time, under the real log: slow, full, torn where a process was killed, cut where power was lost.

The log writes real files in a folder. Its thread is an actor, and its calls of the system go through here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from support.faults.virtual_world import Actor, Over, World

from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log import log_folder, log_writer
from torchfleet.ps.server.log.log_records import SECTOR


class Disk:
    """Where one server's log is. `has_power_cuts`: what was not synced when the server crashes may be gone."""

    def __init__(self, world: World, folder: Path, has_power_cuts: bool) -> None:
        self._world, self.folder, self.has_power_cuts = world, folder, has_power_cuts
        self.delay = 0.002  # seconds, the mean
        self.full_until = 0.0
        self.num_writes = 0
        self._synced: dict[str, bytes] = {}  # by file: what is on the disk for good
        self.writers: list[Actor] = []
        self.syncing: Callable[[], bool] = lambda: False  # called when a sync begins; returns whether it fails
        self.has_failed = False
        self._dropped: dict[str, slice] = {}  # by file: what the kernel has given up to write
        self.steps_left: int | None = None  # changes of files until the process is killed; None: it is not

    @property
    def is_dead(self) -> bool:
        """Whether the process was killed by `steps_left`."""
        return self.steps_left is not None and self.steps_left < 0

    def step(self) -> None:
        """Called before each change of a file. Raises Over where the process is killed."""
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.is_dead:
                raise Over
        if self._world.current is not None:
            self._wait()

    def write(self, file: int, buffers: Sequence[Frame], at: int) -> int:
        """As os.pwritev, in two parts: between them the process may be killed."""
        self.step()
        self._wait()
        if self._world.now < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = b"".join(bytes(memoryview(frame).cast("B")) for frame in buffers if memoryview(frame).nbytes)
        half = self._world.dice.randint(0, len(data))
        os.pwrite(file, data[:half], at)
        self.step()
        os.pwrite(file, data[half:], at + half)
        self.num_writes += 1
        return len(data)

    def sync(self, file: int) -> None:
        """As os.fdatasync."""
        path = os.readlink(f"/proc/self/fd/{file}")
        size = os.fstat(file).st_size
        if self.syncing():
            self.has_failed = True
            self._dropped[path] = slice(len(self._synced.get(path, b"")), size)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.step()
        self._synced[path] = self._kept(path)[:size]

    def crash(self) -> None:
        """The process is gone, and with a power cut some of what was not synced: all of it, or from some byte on."""
        self.steps_left, self.has_failed = None, False
        for writer in self.writers:
            writer.end()
        self.writers.clear()
        if not self.has_power_cuts:
            return
        for path in sorted(self.folder.glob("segment-*")):
            held, synced = self._kept(str(path)), self._synced.get(str(path), b"")
            if held[: len(synced)] == synced:
                path.write_bytes(self._left_of(held, len(synced)))
            self._synced[str(path)] = path.read_bytes()
        self._dropped.clear()

    def _kept(self, path: str) -> bytes:
        """What the file has, without what was dropped: no sync brings that to the disk."""
        held, dropped = bytearray(Path(path).read_bytes()), self._dropped.get(path, slice(0, 0))
        held[dropped] = bytes(len(held[dropped]))
        return bytes(held)

    def _left_of(self, held: bytes, num_synced: int) -> bytes:
        """What is there after a loss of power: not all sectors of what was not synced were written, in any order."""
        dice = self._world.dice
        left = bytearray(held[: dice.randint(num_synced, len(held))])
        if dice.random() < 0.5:
            for start in range(num_synced // SECTOR * SECTOR, len(left), SECTOR):
                lost = slice(max(start, num_synced), min(start + SECTOR, len(left)))
                if dice.random() < 0.5:
                    left[lost] = bytes(lost.stop - lost.start)
        return bytes(left)

    def _wait(self) -> None:
        self._world.sleep(self._world.dice.expovariate(1 / self.delay))


class VirtualCondition:
    """As threading.Condition, among actors: there is nothing to lock, as one runs at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: Actor | None = None

    def __enter__(self) -> VirtualCondition:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        assert self._world.current is not None
        self._waiting = self._world.current
        self._waiting.wait(1e6 if timeout is None else timeout)

    def notify(self) -> None:
        if self._waiting is not None:
            self._waiting.wake()


class VirtualQueue:
    """As queue.SimpleQueue, among actors, of which one takes items."""

    def __init__(self, world: World) -> None:
        self._items: deque[Any] = deque()
        self._world = world
        self._waiting: Actor | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None:
            self._waiting.wake()

    def get(self) -> Any:
        while not self._items:
            assert self._world.current is not None
            self._waiting = self._world.current
            self._waiting.wait(1e6)
        self._waiting = None  # from now on it waits for something else
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class VirtualThreads:
    """As BackgroundThreads, of one thread."""

    def __init__(self, world: World, disk: Disk, work: Callable[[], None]) -> None:
        self._world, self._disk, self._work = world, disk, work
        self._actor: Actor | None = None

    @property
    def error(self) -> BaseException | None:
        if self._disk.is_dead:
            return Over()
        return None if self._actor is None else self._actor.error

    def start(self) -> None:
        self._actor = Actor(self._world, "log", self._work)
        self._disk.writers.append(self._actor)

    def join(self) -> None:
        while self._actor is not None and not self._actor.has_ended:
            self._world.sleep(0.01)


class Disks:
    """All disks of a schedule. While attached, what the log asks of the system goes to the disk it belongs to."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._disks: list[Disk] = []

    def add(self, folder: Path, has_power_cuts: bool) -> Disk:
        self._disks.append(Disk(self._world, folder, has_power_cuts))
        return self._disks[-1]

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        world = self._world

        def threads(works: Sequence[Callable[[], None]], name: str) -> VirtualThreads:
            return VirtualThreads(world, self._of(works[0].__self__._folder.path), works[0])  # type: ignore[attr-defined]

        system = _Names(os, pwritev=self._write, fdatasync=self._sync, fsync=lambda file: None)
        locks = _Names(log_writer.threading, Condition=lambda: VirtualCondition(world))
        queues = _Names(log_writer.queue, SimpleQueue=lambda: VirtualQueue(world))
        with (
            mock.patch.object(log_folder, "os", system),
            mock.patch.object(log_writer, "queue", queues),
            mock.patch.object(log_writer, "threading", locks),
            mock.patch.object(log_writer, "BackgroundThreads", threads),
            mock.patch.object(os, "unlink", self._stepped(os.unlink)),
            mock.patch.object(os, "rename", self._stepped(os.rename)),
            mock.patch.object(os, "replace", self._stepped(os.replace)),
        ):
            yield

    def _stepped(self, change: Callable[..., None]) -> Callable[..., None]:
        """As `change`, of a file on one of the disks or of another."""

        def run(path: Any, *more: Any, **named: Any) -> None:
            for disk in self._disks:
                if str(path).startswith(f"{disk.folder}/"):
                    disk.step()
            change(path, *more, **named)

        return run

    def _of(self, path: Path) -> Disk:
        return next(disk for disk in self._disks if disk.folder == path or disk.folder in path.parents)

    def _write(self, file: int, buffers: Sequence[Frame], at: int) -> int:
        return self._of(Path(os.readlink(f"/proc/self/fd/{file}"))).write(file, buffers, at)

    def _sync(self, file: int) -> None:
        self._of(Path(os.readlink(f"/proc/self/fd/{file}"))).sync(file)


class _Names:
    """A module with some names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
