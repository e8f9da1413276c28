"""Work that the server does in slices between requests: requests over whole tables, long pulls, scheduled shrinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torchfleet.base.errors import ServerBusy
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.server.layers import Result, Run
from torchfleet.ps.server.state.budgets import Budgets
from torchfleet.ps.tables.table import Table

MAX_BEHIND = 16  # requests of a client that may wait for its long pull
MAX_BYTES_BEHIND = 1 << 25
HOUR = 3600


@dataclass
class LongRequest:
    """A request that the server does in slices, and its result once it is done."""

    request: Request
    result: Result = None
    work: Iterator[bool] | None = None  # until there is a result
    due: list[int] = field(default_factory=list)  # of CLOCK: the numbers of the tables to shrink
    dropped: dict[str, int] = field(default_factory=dict)  # of a shrink: rows dropped so far, by table


class Schedule:
    """Decides when the server shrinks tables by itself: when the clock enters another period of `every_hours`.

    Keeps the last period of each table. A table's first period does not cause a shrink.
    """

    def __init__(self) -> None:
        self._periods: dict[int, int] = {}  # by table

    def export(self) -> dict[int, int]:
        """As plain values."""
        return dict(self._periods)

    def restore(self, kept: dict[int, int]) -> None:
        """Restore the state from the result of `export`."""
        self._periods = dict(kept)

    def is_news(self, tables: Iterable[Table], now: int) -> bool:
        """Whether `note` would change anything."""
        for table in tables:
            every = table.spec.shrink.every_hours
            if every is not None and self._periods.get(table.spec.number) != int(now // (every * HOUR)):
                return True
        return False

    def note(self, tables: Iterable[Table], now: int) -> list[Table]:
        """Set the time to `now`. Returns the tables to shrink."""
        due = []
        for table in tables:
            every = table.spec.shrink.every_hours
            if every is None:
                continue
            period = int(now // (every * HOUR))
            if period > self._periods.get(table.spec.number, period):
                due.append(table)
            self._periods[table.spec.number] = period
        return due


@dataclass
class Line:
    """A client's requests behind its long pull, in their order: a push that arrives during a long pull is not visible
    to that pull."""

    work: Iterator[bool]
    behind: deque[Request] = field(default_factory=deque)


class LongPulls:
    """The long pulls in progress, by client. They take turns, slice by slice.

    A layer of the server (layers.py) while there are any: a client's later requests wait for its long pull.
    """

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self.lines: dict[Peer, Line] = {}
        self.switched: Callable[[], None] = lambda: None  # called when the first pull begins, and when the last ends

    def begin(self, peer: Peer, work: Iterator[bool]) -> None:
        self.lines[peer] = Line(work)
        self.switched()

    def around(self, inner: Run, request: Request) -> Result:
        """As Layer.around."""
        line = self.lines.get(request.peer)
        if line is None:
            return inner(request)
        self._budgets.hold(request)
        num_bytes = sum(waiting.num_bytes for waiting in line.behind)
        if len(line.behind) >= MAX_BEHIND or (line.behind and num_bytes + request.num_bytes > MAX_BYTES_BEHIND):
            raise ServerBusy(
                f"{len(line.behind)} requests of {num_bytes:,} bytes wait for a long pull of this client, at most "
                f"{MAX_BEHIND} and {MAX_BYTES_BEHIND:,}. Wait for its answer."
            )
        line.behind.append(request)
        return None

    def work(self) -> list[Request]:
        """Do one slice of the pull that has waited longest. If it is done, returns the requests that waited for it."""
        peer = next(iter(self.lines))
        line = self.lines.pop(peer)
        if next(line.work, None) is None:
            self.switched()
            return list(line.behind)
        self.lines[peer] = line  # behind all others
        return []

    def clear(self) -> None:
        """Drop all long pulls."""
        if self.lines:
            self.lines.clear()
            self.switched()


class WorkQueue:
    """All work that the server does in slices."""

    def __init__(self, budgets: Budgets) -> None:
        self.slices: deque[Iterator[bool]] = deque()  # each yields the result of Server.work after a slice
        self.requests: dict[int, LongRequest] = {}  # over whole tables, by token: unfinished, and the last finished
        self.pulls = LongPulls(budgets)
        self.schedule = Schedule()
