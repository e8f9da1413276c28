"""A server that logs its changes. A reply is sent when all sinks have confirmed every change that it may show.

All replies after a change wait until its entry is confirmed, so no client sees the change earlier. If the server ends
before that, the change may be lost, but no client has seen it.
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
from torchfleet.ps.server.log.held_replies import HeldReplies
from torchfleet.ps.server.log.journal import Journal
from torchfleet.ps.server.log.log_entry import Entry, Kind, encode_entry
from torchfleet.ps.server.log.sink import PUT_OFF, Sink
from torchfleet.ps.server.log.state_copy import export_state, in_parts
from torchfleet.ps.server.server import Server

Replies = list[tuple[Peer, list[Frame]]]


@dataclass
class Copy:
    """A copy of the state that is being given to one destination."""

    pieces: Iterator[list[Frame]]
    take: Callable[[int, Sequence[Frame]], None]
    has_room: Callable[[], bool]
    done: Callable[[], None]


class LoggedServer:
    """A Handler that wraps a Server. All requests and replies of the server pass through it."""

    def __init__(
        self,
        server: Server,
        sinks: Sequence[Sink],
        index: int = 0,
        term: int = 0,
        begun: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index`, `term`: those of the last entry. `begun`: the value from which the server's own time continues;
        None: the time of `clock`. Time in which no server ran is not counted."""
        self.server, self.refusals = server, server.refusals
        self._journal = Journal(server, sinks, index, term)
        self._clock, self._offset = clock, 0.0 if begun is None else begun - clock()
        self._held = HeldReplies()
        self._copies: deque[Copy] = deque()
        self._bell, self._is_woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), False
        self._is_handling = False  # while True, `wake` does nothing: `handle` checks at its end what is confirmed
        server.record(self._journal)
        server.state.now = self.now
        server.state.meetings.presence.pause(self.now())

    def now(self) -> float:
        """The server's own time in seconds. A server that is restored, or takes over, continues it."""
        return self._clock() + self._offset

    @property
    def index(self) -> int:
        """The index of the last entry."""
        return self._journal.index

    @property
    def term(self) -> int:
        """The term of new entries."""
        return self._journal.term

    def lead(self, term: int) -> None:
        """Begin a term: new entries have it. Replies must wait until `is_noted`."""
        self._journal.term = term

    @property
    def is_noted(self) -> bool:
        """Whether the term is in the log on disk, if there is one: a later restore then prefers it to an older log."""
        return True

    @property
    def confirmed(self) -> int:
        """The highest index that all sinks have confirmed; without sinks, the index of the last entry."""
        sinks = self._journal.sinks
        if len(sinks) == 1:  # the common case; runs after every request
            return sinks[0].confirmed()
        return min((sink.confirmed() for sink in sinks), default=self.index)

    @property
    def is_stopping(self) -> bool:
        """Whether the server is stopping and has sent all replies."""
        return self.server.is_stopping and not self._held.waiting

    def add_sink(self, sink: Sink) -> None:
        """Append all later entries to this sink too. Replies wait for it."""
        self._journal.sinks.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        """Append no more entries to this sink. Replies no longer wait for it. The caller closes it."""
        self._journal.sinks.remove(sink)

    def copy_to(
        self,
        take: Callable[[int, Sequence[Frame]], None],
        has_room: Callable[[], bool],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Give the state to `take`, as entries of the kind PIECE: the first piece now, the others in `work`, whenever
        `has_room()`. The destination must also get all entries made after this call, in order. `done` is called after
        the last piece. Copies to several destinations are made one after the other."""
        copy = Copy(export_state(self.server, self.index), take, has_room, done)
        self._copies.append(copy)
        self._give(copy)

    def end_copy(self, take: Callable[[int, Sequence[Frame]], None]) -> None:
        """Stop the copies to `take`. Their `done` is not called."""
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
            self._is_handling = False  # before `_hold` reads what is confirmed, so that no `wake` is lost
        return self._hold(replies)

    def check(self) -> None:
        """Raise LogError if a sink has failed for good: no further change would be safe. `tick` calls it."""

    def ready(self) -> Replies:
        """As Handler.ready. Also returns held replies whose entries are confirmed by now."""
        return self._hold(self.server.ready())

    def tick(self, now: float) -> Replies:
        """As Handler.tick. Raises LogError: see `check`."""
        self.check()
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
        """Wake the server's loop, because a sink may have confirmed more. Any thread may call it."""
        if not self._is_handling:
            os.eventfd_write(self._bell, 1)
            self._is_woken = True

    def close(self, is_over: bool = False) -> None:
        """Close all sinks. Held replies are never sent, so no client sees an unconfirmed change. `is_over`: the job has
        ended, so its log on disk may be removed."""
        for sink in self._journal.sinks:
            sink.close()
        self.server.record(None)
        os.close(self._bell)

    def work(self) -> bool | None:
        """As Handler.work. If nothing was done and replies are held, returns whether the first of them can be sent."""
        if self._is_woken:
            self._is_woken = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        if self._copies and self._copies[0].has_room():
            self._give(self._copies[0])
            self.server.work()
            return True
        worked = self.server.work()
        if worked or not self._held.waiting:
            return worked
        return self._held.first_index <= self.confirmed

    def _hold(self, replies: Replies) -> Replies:
        held = self._held.waiting
        if not replies and not held:
            return []
        index, confirmed = self._journal.index, self.confirmed
        ready = list(self._held.confirmed(confirmed)) if held else []
        if index <= confirmed:
            return ready + replies if ready else replies
        for peer, frames in replies:
            self._held.add(index, peer, frames)
        for sink in self._journal.sinks:
            sink.flush(PUT_OFF)
        return ready

    def _give(self, copy: Copy) -> None:
        piece = next(copy.pieces, None)
        if piece is None:
            self._copies.remove(copy)
            copy.done()
            return
        for part in in_parts(piece):
            entry = Entry(Kind.PIECE, self.index, self.term, time=self.now(), frames=part)
            copy.take(self.index, encode_entry(entry))
