"""Records each change of a server as an entry, with the decisions that the tables made, for all sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torchfleet.base.errors import FleetError, LogStuck, ServerBusy
from torchfleet.ps.net.packed import pack_arrays, peer_bytes
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import BOUNDED, NO_CREATE, Command
from torchfleet.ps.server.commands import COMMANDS
from torchfleet.ps.server.layers import Result, Run
from torchfleet.ps.server.log.log_entry import Effects, Entry, Kind, LongResult, Refused, encode_entry, noted_table
from torchfleet.ps.server.log.sink import Sink
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state.work_queue import LongRequest
from torchfleet.ps.tables.rows.row_statistics import is_counted
from torchfleet.ps.tables.table import Table

_UNKNOWN = Effects()  # a placeholder until the change is made
LOOK = 0.05  # seconds between two readings of the wall clock, which tables use in whole seconds

READS = frozenset(
    {Command.PING, Command.STATS, Command.INSPECT, Command.WALK, Command.STOP, Command.TABLES, Command.SUBSCRIBE}
)
_PULL = int(Command.PULL)  # a plain number: to compare with an enumeration's member takes longer
_ALWAYS_ANSWERED = frozenset({Command.PING, Command.STATS, Command.STOP})


class Journal:
    """The Recorder of a server.

    A change is applied first and recorded afterwards. The entry therefore contains its decisions, and a request that
    is refused with ServerBusy has no entry. A reply waits until its entry is safe, so no client sees an unsafe one.
    """

    def __init__(self, server: Server, sinks: Sequence[Sink], index: int, term: int) -> None:
        """`index`, `term`: those of the last entry."""
        self.sinks = list(sinks)
        self.index, self.term = index, term
        self._server = server
        self._stuck_since: float | None = None
        self._wall, self._measured_at = 0, -LOOK  # the tables' time, and the server's time when it was read
        self._known: dict[int, Table] = {}
        self._counting: set[int] = set()  # numbers of the tables that a pull for training changes
        self._counted: list[Table] = []  # the tables with these numbers, in ascending order

    def around(self, inner: Run, request: Request) -> Result:
        """As Layer.around. While a sink cannot accept changes, raises LogStuck for all but PING, STATS and STOP."""
        for sink in self.sinks:
            if trouble := sink.trouble():
                self._check(request, trouble)
        if len(self._known) != len(self._server.state.tables):
            self._look_at_tables()
        if not self._is_change(request):
            return inner(request)
        num_finished, deciding = len(self._server.state.finished), self._counted
        entry = self._begin(Kind.REQUEST, request.arrived, deciding)
        entry.role, entry.peer, entry.frames = request.role, peer_bytes(request.peer), request.frames
        num_errors = 1
        try:
            result = inner(request)
            num_errors = int(isinstance(result, FleetError))
            return result
        except ServerBusy:
            entry.kind = 0
            raise
        except FleetError as error:  # no table has changed; only the outcome must be remembered
            entry.kind = 0
            self._append_refused(entry, request, error)
            raise
        finally:  # also after a bug in a command: it may have changed something, and a replay has the same bug
            entry.effects = self._end(deciding)
            entry.effects.num_errors = num_errors + self._num_errors(num_finished)
            if entry.kind:
                self.append(entry)

    def advance(self, now: float, pause: float, run: Callable[[float, float], bool]) -> bool:
        """As Recorder.advance. Returns False while a sink cannot accept changes; the next `pause` covers that time."""
        if any(sink.trouble() for sink in self.sinks):
            self._stuck_since = now - pause if self._stuck_since is None else self._stuck_since
            return False
        if self._stuck_since is not None:
            pause, self._stuck_since = now - self._stuck_since, None
        num_finished = len(self._server.state.finished)
        entry = self._begin(Kind.TICK, now, self._counted)
        entry.pause = pause
        is_changed = run(now, pause)
        entry.effects = self._end(self._counted)
        entry.effects.num_errors = self._num_errors(num_finished)
        if is_changed:
            self.append(entry)
        return True

    def work(self, run: Callable[[], bool]) -> bool:
        """As Recorder.work. A slice of INSPECT, and a slice without effects, have no entry."""
        state, deciding = self._server.state, list(self._server.state.tables.values())
        front, attempt, num_works = state.work.slices[0], state.saves.chain.attempt, len(state.work.slices)
        token, long = next(((t, n) for t, n in state.work.requests.items() if n.work is front), (0, None))
        entry = self._begin(Kind.SLICE, state.now(), deciding)
        worked = run()
        effects = entry.effects = self._end(deciding)
        if long is not None and long.request.message.command == Command.INSPECT:
            return worked
        effects.token, effects.is_begun = token, state.saves.chain.attempt != attempt
        if (long is None and len(state.work.slices) < num_works) or (long is not None and long.result is not None):
            effects.result = _result(long)
        if long is not None and long.result is not None:
            long.work = None  # so that its result is recorded only once
        if effects.tables or effects.is_begun or effects.result is not None:
            self.append(entry)
        return worked

    def append(self, entry: Entry) -> None:
        """Give the entry the next index and the current term, and append it to all sinks. Does not block."""
        self.index += 1
        entry.index, entry.term = self.index, self.term
        frames = encode_entry(entry)
        for sink in self.sinks:
            sink.append(self.index, frames)

    def _is_change(self, request: Request) -> bool:
        """Whether the request needs an entry. Creating a row alone needs none: its first values depend on its key."""
        message = request.message
        command, sequence = message.command, message.sequence
        if command == _PULL and not sequence and not message.flags & BOUNDED:  # first, because most requests are these
            if not self._counting or message.flags & NO_CREATE:
                return False
            return any(array.number in self._counting for array in message.arrays)
        if command in READS:
            return False
        return not (sequence and self._server.state.sessions.is_settled(message.client, sequence))

    def _look_at_tables(self) -> None:
        self._known = dict(self._server.state.tables)
        self._counting = {number for number, table in self._known.items() if is_counted(table.spec)}
        self._counted = [self._known[number] for number in sorted(self._counting)]

    @staticmethod
    def _check(request: Request, trouble: str) -> None:
        """Raise LogStuck, unless the command is always answered. A read could show a change that is not safe."""
        if request.message.command not in _ALWAYS_ANSWERED:
            raise LogStuck(
                f"{trouble} No acknowledged change is lost. The server answers again once this is resolved: "
                "retry later."
            )

    def _begin(self, kind: Kind, now: float, deciding: Iterable[Table]) -> Entry:
        if not 0 <= now - self._measured_at < LOOK:
            self._wall, self._measured_at = self._server.state.clock.measured(), now
        self._server.state.clock.freeze(self._wall)
        for table in deciding:
            table.begin_noting()
        return Entry(kind, wall=self._wall, time=now, effects=_UNKNOWN)

    def _end(self, deciding: Iterable[Table]) -> Effects:
        self._server.state.clock.freeze(None)
        effects = Effects([])
        for table in deciding:
            noted = table.end_noting()
            if noted is not None:
                effects.tables.append(noted_table(table.spec.number, noted))
        return effects

    def _num_errors(self, start: int) -> int:
        finished = self._server.state.finished
        return sum(isinstance(result, FleetError) for _, result in finished[start:]) if len(finished) > start else 0

    def _append_refused(self, entry: Entry, request: Request, error: FleetError) -> None:
        """Append an entry with the outcome of a refused change: after a restart, a repeat gets the same error."""
        message = request.message
        handler = COMMANDS[message.command]
        if not message.sequence or not (handler.once or handler.again is not None):
            return
        if not self._server.state.sessions.is_running(message.client, message.sequence):
            return  # its number was refused, so there is no outcome to remember
        refused = Refused(
            message.client, message.sequence, message.floor, message.worker, message.incarnation,
            type(error).__name__, str(error),
        )  # fmt: skip
        self.append(Entry(Kind.REFUSED, wall=entry.wall, time=entry.time, effects=Effects([], refused=refused)))


def _result(long: LongRequest | None) -> LongResult:
    if long is None or long.result is None:
        return LongResult([])
    if isinstance(long.result, FleetError):
        return LongResult([], (type(long.result).__name__, str(long.result)))
    return LongResult(pack_arrays(long.result))
