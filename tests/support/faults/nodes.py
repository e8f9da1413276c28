"""Processes that serve, in virtual time: they are stopped and wake up, crash, and are started again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from support.faults.network import Doors, Frames
from support.faults.virtual_world import Stuck

from torchfleet.ps.net.transport import Handler, Peer
from torchfleet.ps.net.wire import Frame

TICK = 0.1  # seconds between two looks at the clock, as a transport makes them
MAX_SLICES = 2000


class Node:
    """A server behind a door. `make` starts its process; `skew`: how far its machine's clock is ahead."""

    def __init__(self, doors: Doors, name: str, make: Callable[[], Handler], skew: float = 0.0) -> None:
        self.name, self.skew, self._make, self._doors = name, skew, make, doors
        self.world = doors.network.world
        self.handler: Any = None
        self.is_starting = False
        self._doom: Callable[[], None] | None = None
        self._life = 0  # counts starts: what was planned for an earlier process is void
        self._frozen_until = 0.0
        self._queue: deque[tuple[bytes, Frames]] = deque()
        doors.behind[name] = self.take
        self.start()

    @property
    def is_alive(self) -> bool:
        return self.handler is not None

    @property
    def is_frozen(self) -> bool:
        return self.world.now < self._frozen_until

    def start(self) -> None:
        assert self.handler is None
        self.is_starting = True
        self._life += 1
        self._queue.clear()
        with self.world.on_machine(self.skew):
            made = self._make()  # which may take time
        self.handler, self.is_starting = made, False
        self._tick_later(self._life)

    def crash(self) -> None:
        """As kill -9: what it had not handed on is gone."""
        self.handler, self._frozen_until = None, 0.0

    def freeze(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after so long. What comes meanwhile waits in its sockets."""
        if not self.is_alive or self.is_frozen:
            return
        self._frozen_until, life = self.world.now + seconds, self._life
        self.world.at(self._frozen_until, lambda: self._wake(life))

    def when_it_serves(self, happen: Callable[[], None], seconds: float) -> None:
        """So soon after the next request that it takes."""
        self._doom = lambda: self.world.after(seconds, happen)

    def take(self, peer: bytes, frames: Frames) -> None:
        """A request arrives."""
        if self.is_frozen:
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
        with self.world.on_machine(self.skew):
            self.send(self.handler.handle(peer, frames, None))
        self._look()
        doom, self._doom = self._doom, None
        if doom is not None:
            doom()

    def _look(self) -> None:
        """Long work, and what is due: as the loop of a transport does between requests."""
        with self.world.on_machine(self.skew):
            for _ in range(MAX_SLICES):
                worked = self.handler.work()
                self.send(self.handler.tick(self.world.now + self.skew))
                if not worked:
                    self.handler.rest()
                    return
        raise Stuck(f"{self.name}: its work has no end")

    def _wake(self, life: int) -> None:
        if life != self._life or not self.is_alive:
            return
        waiting, self._queue = self._queue, deque()
        for peer, frames in waiting:
            self.take(peer, frames)
        self.poke()

    def _tick_later(self, life: int) -> None:
        def tick() -> None:
            if life == self._life and self.is_alive:
                self.poke()
                self._tick_later(life)

        self.world.after(TICK, tick)
