"""Processes that serve, in virtual time: they are stopped and wake up, crash, and are started again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from support.faults.clocks import MachineClock
from support.faults.network import Doors, Frames
from support.faults.virtual_world import Over, Stuck

from torchfleet.ps.net.transport import Handler, Peer
from torchfleet.ps.net.wire import Frame

TICK = 0.1  # seconds between two looks at the clock, as a transport makes them
MAX_SLICES = 2000


class Node:
    """A server behind a door. `make` starts its process; `clock`: that of its machine."""

    tick_seconds = TICK

    def __init__(self, doors: Doors, name: str, make: Callable[[], Handler], clock: MachineClock) -> None:
        self.name, self.clock, self._make, self._doors = name, clock, make, doors
        self.world = doors.network.world
        self.handler: Any = None
        self.is_starting = False
        self._doom: Callable[[], None] | None = None
        self._life = 0  # counts starts: what was planned for an earlier process is void
        self._busy_life = 0  # the process whose code runs, or waits for an answer
        self._frozen_until = 0.0
        self._queue: deque[tuple[bytes, Frames]] = deque()
        doors.behind[name] = self.take
        self.start()

    @property
    def is_alive(self) -> bool:
        return self.handler is not None

    @property
    def is_frozen(self) -> bool:
        """Whether it does not look at what comes: it is stopped, or waits for something else."""
        return self.world.now < self._frozen_until or self._busy_life == self._life

    def start(self) -> None:
        assert self.handler is None
        self.is_starting = True
        self._life += 1
        self._queue.clear()
        try:
            with self.world.on_machine(self.clock):
                self.handler = self._make()  # which may take time
        finally:
            self.is_starting = False
        self._tick_later(self._life)

    def crash(self) -> None:
        """As kill -9: what it had not handed on is gone."""
        self.handler, self._frozen_until, self._busy_life = None, 0.0, 0

    def finish(self) -> bool:
        """Its process ends by itself, as ServerRun lets it end. Returns False if it is killed meanwhile."""
        life = self._life
        with self._running():
            self.handler.end()
        if life != self._life or self.handler is None:
            return False
        self.handler = None  # it has closed its files
        self.crash()
        return True

    def freeze(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after so long. What comes meanwhile waits in its sockets."""
        until = self.world.now + seconds
        if self.is_alive and until > self._frozen_until:
            self._frozen_until, life = until, self._life
            self.world.at(until, lambda: self._wake(life))

    def wait(self, seconds: float) -> None:
        """Called by its own code, which waits for an answer so long. Raises Over if the process is killed meanwhile."""
        life = self._life
        self.world.sleep(seconds)
        if self.world.now < self._frozen_until and life == self._life:
            self.world.sleep(self._frozen_until - self.world.now)
        if life != self._life or not (self.is_alive or self.is_starting):
            raise Over

    def when_it_serves(self, happen: Callable[[], None], seconds: float) -> None:
        """So soon after the next request that it takes."""
        self._doom = lambda: self.world.after(seconds, happen)

    def take(self, peer: bytes, frames: Frames) -> None:
        """A request arrives."""
        if self.is_alive and self.is_frozen:
            self._queue.append((peer, frames))
        elif self.is_alive:
            self._serve(peer, frames)

    def poke(self) -> None:
        """Something that it waits for may have happened, such as a write to its disk."""
        if self.is_alive and not self.is_frozen:
            self._look()

    def send(self, replies: Sequence[tuple[Peer, list[Frame]]]) -> None:
        for peer, frames in replies:
            assert isinstance(peer, bytes)
            self._doors.reply(self.name, peer, frames)

    def _serve(self, peer: bytes, frames: Frames) -> None:
        with self._running():
            self.send(self.handler.handle(peer, frames, None))
        if self.is_alive:
            self._look()
        doom, self._doom = self._doom, None
        if doom is not None:
            doom()

    def _look(self) -> None:
        """Long work, and what is due: as the loop of a transport does between requests."""
        with self._running():
            for _ in range(MAX_SLICES):
                worked = self.handler.work()
                self.send(self.handler.tick(self.clock.monotonic()))
                if not worked:
                    self.handler.rest()
                    break
            else:
                raise Stuck(f"{self.name}: its work has no end")
        pause = self.world.load.pause(self.world.dice)
        if pause:
            self.freeze(pause)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """The process's own code runs within this. What comes while it waits for an answer is looked at behind it."""
        life = self._busy_life = self._life
        try:
            with self.world.on_machine(self.clock):
                yield
        except Over:
            assert life != self._life or not self.is_alive
        if life == self._busy_life:
            self._busy_life = 0
        if life == self._life and self._queue and not self.is_frozen:
            self.world.after(0.0, lambda: self._wake(life))

    def _wake(self, life: int) -> None:
        while life == self._life and self.is_alive and not self.is_frozen:
            if not self._queue:
                self.poke()
                return
            self.take(*self._queue.popleft())

    def _tick_later(self, life: int) -> None:
        def tick() -> None:
            if life == self._life and self.is_alive:
                self.poke()
                self._tick_later(life)

        self.world.after(self.tick_seconds, tick)
