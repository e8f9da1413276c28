"""A server that logs its changes. A reply is sent when all sinks have confirmed every change that it may show.

All replies after a change wait until its entry is confirmed, so no client sees the change before. If the server ends in
between, the change is lost, and no client was told of it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import Frame, Role
from torchfleet.ps.server.log.journal import Journal
from torchfleet.ps.server.log.log_entry import Entry, Kind, encode_entry
from torchfleet.ps.server.log.sink import Sink
from torchfleet.ps.server.log.state_copy import export_state
from torchfleet.ps.server.server import Server

Replies = list[tuple[Peer, list[Frame]]]


@dataclass
class Copy:
    """A copy of the state under way to one place."""

    pieces: Iterator[list[Frame]]
    take: Callable[[int, Sequence[Frame]], None]
    has_room: Callable[[], bool]
    done: Callable[[], None]


class LoggedServer:
    """The Handler of a transport around a Server. Everything that goes in or out comes by here."""

    def __init__(
        self,
        server: Server,
        sinks: Sequence[Sink],
        index: int = 0,
        term: int = 0,
        begun: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index`, `term`: of the last entry. `begun`: the server's own time, which goes on from there; None: the
        clock's. Time in which the server did not run does not count."""
        self.server, self.refusals = server, server.refusals
        self._journal = Journal(server, sinks, index, term)
        self._clock, self._offset = clock, 0.0 if begun is None else begun - clock()
        self._held: deque[tuple[int, Peer, list[Frame]]] = deque()  # replies, with what must be confirmed first
        self._copies: deque[Copy] = deque()
        self._bell, self._is_woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), False
        self._is_handling = False  # a request: at its end it is looked at what is confirmed
        server.record(self._journal)
        server.state.now = self.now
        server.state.meetings.presence.pause(self.now())

    def now(self) -> float:
        """The server's own time, which a server that takes its place continues."""
        return self._clock() + self._offset

    @property
    def index(self) -> int:
        """Of the last entry."""
        return self._journal.index

    @property
    def term(self) -> int:
        """In which entries are made."""
        return self._journal.term

    @term.setter
    def term(self, term: int) -> None:
        self._journal.term = term

    @property
    def confirmed(self) -> int:
        """The highest index that is safe everywhere."""
        sinks = self._journal.sinks
        if len(sinks) == 1:  # looked at after every request
            return sinks[0].confirmed()
        return min((sink.confirmed() for sink in sinks), default=self.index)

    @property
    def is_stopping(self) -> bool:
        """Whether the server is stopping and has sent all replies."""
        return self.server.is_stopping and not self._held

    def add_sink(self, sink: Sink) -> None:
        """From now on entries go there too, and replies wait for it."""
        self._journal.sinks.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Replies no longer wait for this sink."""
        self._journal.sinks.remove(sink)

    def copy_to(
        self,
        take: Callable[[int, Sequence[Frame]], None],
        has_room: Callable[[], bool],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Give the state to `take`, as entries of the kind PIECE: its first piece now, the others beside serving,
        whenever there is room. All entries after this call must come there too, in order. `done` is called after the
        last piece."""
        copy = Copy(export_state(self.server, self.index), take, has_room, done)
        self._copies.append(copy)
        self._give(copy)

    def end_copy(self, take: Callable[[int, Sequence[Frame]], None]) -> None:
        """Give nothing more of the state to `take`."""
        self._copies = deque(copy for copy in self._copies if copy.take != take)

    @property
    def is_copying(self) -> bool:
        return bool(self._copies)

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> Replies:
        """As Handler.handle."""
        self._is_handling = True
        try:
            replies = self.server.handle(peer, frames, role)
        finally:
            self._is_handling = False  # before it is looked at what is confirmed: see `wake`
        return self._hold(replies)

    def ready(self) -> Replies:
        """As Handler.ready: also those whose entries have been confirmed since."""
        return self._hold(self.server.ready())

    def tick(self, now: float) -> Replies:
        """As Handler.tick."""
        return self._hold(self.server.tick(now + self._offset))

    def rest(self) -> bool:
        """As Handler.rest."""
        for sink in self._journal.sinks:
            sink.flush()
        return self.server.rest()

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes."""
        return (self._bell,)

    def wake(self) -> None:
        """More may be confirmed: replies can go. For any thread."""
        if not self._is_handling:
            os.eventfd_write(self._bell, 1)
            self._is_woken = True

    def close(self) -> None:
        """Close all sinks. No client was told of the changes that they have not confirmed."""
        for sink in self._journal.sinks:
            sink.close()
        self.server.record(None)
        os.close(self._bell)

    def work(self) -> bool | None:
        """As Handler.work; False also while replies wait for sinks."""
        if self._is_woken:
            self._is_woken = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        if self._copies and self._copies[0].has_room():
            self._give(self._copies[0])
            self.server.work()
            return True
        worked = self.server.work()
        if worked or not self._held:
            return worked
        return self._held[0][0] <= self.confirmed

    def _hold(self, replies: Replies) -> Replies:
        ready: Replies = []
        for peer, frames in replies:
            self._held.append((self._journal.index, peer, frames))
        if self._held:
            confirmed = self.confirmed
            while self._held and self._held[0][0] <= confirmed:
                ready.append(self._held.popleft()[1:])
        return ready

    def _give(self, copy: Copy) -> None:
        piece = next(copy.pieces, None)
        if piece is None:
            self._copies.remove(copy)
            copy.done()
            return
        entry = Entry(Kind.PIECE, self.index, self.term, time=self.now(), frames=piece)
        copy.take(self.index, encode_entry(entry))
