"""Replays entries: a server that applies all of them in order reaches the state of the server that made them."""

from __future__ import annotations

import numpy as np

from torchfleet.base.errors import FleetError, LogError
from torchfleet.ps.net.packed import away, error_of, unpack_answer
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_BODY, Command, decode, unpack
from torchfleet.ps.server.arrays import only
from torchfleet.ps.server.log.log_entry import Effects, Entry, Kind, noted_of
from torchfleet.ps.server.log.state_copy import StateImport
from torchfleet.ps.server.saves.table_saving import SaveBody, begin_save
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.policies.decisions import Noted


class Replay:
    """Applies entries to a server. The server must not serve requests before `finish`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.index = 0  # of the last applied entry
        self.term = 0
        self.time = 0.0  # the own time of the server that made the entries, at the last applied entry
        self._import = StateImport(server)
        self._lenient(True)

    @property
    def is_complete(self) -> bool:
        """Whether the last piece of the state has been applied, so that `finish` may be called."""
        return self._import.is_complete

    def apply(self, entry: Entry) -> None:
        """Apply an entry. Raises LogError if it is not the next one, or leads to more or fewer errors than recorded."""
        if entry.kind == Kind.PIECE:
            if self._import.copy is None:
                self.index, self.term, self.time = entry.index, entry.term, entry.time
            elif entry.index != self.index:
                raise LogError(f"a piece of the state at entry {entry.index} came after entry {self.index}")
            self._import.take(entry.frames)
            return
        self._import.check_begun()
        if entry.index != self.index + 1 or entry.term < self.term:
            raise LogError(
                f"expected entry {self.index + 1} of term {self.term} or later, found {entry.index} of {entry.term}"
            )
        try:
            self._apply(entry)
        except LogError:
            raise
        except (FleetError, KeyError, ValueError) as error:
            raise LogError(f"entry {entry.index} cannot be applied: {type(error).__name__}: {error}") from error
        self.index, self.term, self.time = entry.index, entry.term, max(self.time, entry.time)

    def finish(self) -> None:
        """End the replay: the server then checks requests itself. Raises LogError if pieces are missing."""
        if not self.is_complete:
            raise LogError("the state that entries continue is not complete: pieces of it are missing")
        self._lenient(False)

    def _lenient(self, is_lenient: bool) -> None:
        """Switch the checks of budgets and claims off or on. The server that made the entries has made these checks."""
        self.server.state.is_following = is_lenient
        self.server.state.budgets.is_lenient = is_lenient

    def _apply(self, entry: Entry) -> None:
        state = self.server.state
        state.clock.freeze(entry.wall)
        try:
            self._follow(entry.effects)
            self._make(entry)
        finally:
            state.clock.freeze(None)
            for table in state.tables.values():
                table.follow_no_more()
        num_errors = sum(isinstance(result, FleetError) for _, result in state.finished)
        state.finished = []
        if num_errors != entry.effects.num_errors:
            raise LogError(
                f"entry {entry.index} led to {num_errors} errors, and to {entry.effects.num_errors} where it was made: "
                "this server is not the same. Is it of the same release, with the same settings?"
            )

    def _follow(self, effects: Effects) -> None:
        noted = {written.table: noted_of(written) for written in effects.tables}
        for number, table in self.server.state.tables.items():
            table.follow(noted.get(number, _NOTHING))

    def _make(self, entry: Entry) -> None:
        if entry.kind == Kind.REQUEST:
            self.server.repeat(
                Request(decode(entry.frames), away(entry.peer), entry.time, entry.role, frames=entry.frames)
            )
            self.server.state.work.pulls.clear()  # unfinished long pulls change nothing: their clients repeat them
        elif entry.kind == Kind.REFUSED:
            self._refuse(entry)
        elif entry.kind == Kind.TICK:
            self.server.advance(entry.time, entry.pause)
        elif entry.kind == Kind.SLICE:
            self._slice(entry.effects)

    def _refuse(self, entry: Entry) -> None:
        refused, sessions = entry.effects.refused, self.server.state.sessions
        if refused is None:
            raise LogError(f"entry {entry.index} is of a change that was refused, and does not say which")
        sessions.begin(refused.client, refused.sequence, refused.floor, entry.time, refused.worker, refused.incarnation)
        sessions.settle(refused.client, refused.sequence, error_of(refused.kind, refused.text))

    def _slice(self, effects: Effects) -> None:
        """Note the progress of a slice in its long request. `_follow` has already dropped the rows of the slice."""
        state, long = self.server.state, self.server.state.work.requests.get(effects.token)
        if long is None:  # the server began it by its own schedule
            own = {id(known.work) for known in state.work.requests.values()}
            scheduled = [work for work in state.work.slices if id(work) not in own]
            if effects.result is not None and scheduled:
                state.work.slices.remove(scheduled[0])
            return
        if effects.is_begun:
            begin_save(state, unpack(only(long.request), SaveBody, MAX_BODY))
        if long.request.message.command != Command.SAVE:
            for written in effects.tables:
                name = state.table(written.table).spec.name
                long.dropped[name] = long.dropped.get(name, 0) + len(written.dropped) // np.uint64().itemsize
        if effects.result is not None:
            long.result = unpack_answer(effects.result.packed())
            if long.work is not None:
                state.work.slices.remove(long.work)
            long.work = None


_NOTHING = Noted()
