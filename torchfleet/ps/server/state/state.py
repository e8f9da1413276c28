"""The state of a server: its tables, and what it remembers of clients, meetings and long work."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchfleet.base.errors import CheckpointError, FleetError, ServerBusy, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array
from torchfleet.ps.server.meeting.barrier import Barriers
from torchfleet.ps.server.meeting.bound import Bound
from torchfleet.ps.server.meeting.file_lists import FileLists
from torchfleet.ps.server.meeting.gathering import Gatherings
from torchfleet.ps.server.meeting.mail import Mail
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.meeting.presence import Presence
from torchfleet.ps.server.state.budgets import Budgets
from torchfleet.ps.server.state.changes import Changes
from torchfleet.ps.server.state.claims import MAX_TABLES, Agreement
from torchfleet.ps.server.state.hot_keys import HotKeys
from torchfleet.ps.server.state.long_pulls import LongPulls
from torchfleet.ps.server.state.loop_load import LoopLoad
from torchfleet.ps.server.state.refusals import Refusals
from torchfleet.ps.server.state.saves_made import SavesMade
from torchfleet.ps.server.state.schedule import Schedule
from torchfleet.ps.server.state.sessions import Outcome, Sessions
from torchfleet.ps.server.state.spare_memory import SpareMemory
from torchfleet.ps.tables.kinds import make_table
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.spec import TableSpec, differences
from torchfleet.ps.tables.table import Table

Answer = list[Array]  # the arrays of a reply


def _nothing(text: str) -> None:
    pass


def _monotonic() -> float:
    return time.monotonic()


@dataclass
class LongRequest:
    """A request that is worked on in slices, or done: who is to be told, and what."""

    request: Request
    result: Answer | FleetError | None = None
    work: Iterator[bool] | None = None  # until there is a result
    due: list[int] = field(default_factory=list)  # of a new time: the tables that are shrunk for it, by number
    dropped: dict[str, int] = field(default_factory=dict)  # of a shrink: rows so far, by table


@dataclass
class Chain:
    """The saves that a delta may continue, by their tokens."""

    attempt: int = 0  # the last one that was made here; whether it came to be the model is not known yet
    base: int = 0  # the one before, which is

    def begin(self, token: int, parent: int, is_delta: bool) -> bool:
        """A save that continues `parent`; returns whether the last attempt is on disk for good."""
        is_committed = parent != self.base or not parent
        if parent and parent == self.attempt:
            self.base = parent
        elif is_committed:
            if is_delta:
                raise CheckpointError(
                    "the tables of this server do not come from the last save there, so there is nothing that a delta "
                    "could continue: make a full save (mode=0)"
                )
            self.base = 0
        self.attempt = token
        return is_committed


@dataclass
class State:
    """All that a server owns."""

    max_table_bytes: int
    save_roots: tuple[str, ...] = ()  # folders below which saves may be written; none: save_roots.py says where
    num_workers: int = 0  # ends when so many have left; 0: only on STOP or a signal
    tables: dict[int, Table] = field(default_factory=dict)
    sessions: Sessions = field(default_factory=Sessions)
    budgets: Budgets = field(default_factory=Budgets)
    spare_memory: SpareMemory = field(default_factory=SpareMemory)
    refusals: Refusals = field(default_factory=Refusals)
    members: Members = field(default_factory=Members)
    barriers: Barriers = field(init=False)
    changes: Changes = field(default_factory=Changes)
    gatherings: Gatherings = field(init=False)
    mail: Mail = field(default_factory=Mail)
    files: FileLists = field(default_factory=FileLists)
    presence: Presence = field(default_factory=Presence)
    place: tuple[int, int] | None = None  # this server's number, and that of servers; None: it was not told
    agreement: Agreement | None = None  # what the workers that are here said of their job
    is_following: bool = False  # entries are applied that another server, or this one before, has made
    long_requests: dict[int, LongRequest] = field(default_factory=dict)  # by token
    chain: Chain = field(default_factory=Chain)
    clock: Clock = field(default_factory=Clock)
    schedule: Schedule = field(default_factory=Schedule)
    long_work: deque[Iterator[bool]] = field(default_factory=deque)  # done in slices between requests
    long_pulls: LongPulls = field(default_factory=LongPulls)
    sync_step: dict[int, Request] = field(default_factory=dict)  # this step's pushes so far, by worker
    num_steps: int = 0  # steps of all workers that were made
    gathered: list[Request] = field(default_factory=list)  # pushes that wait for others to be one update with them
    num_dropped: int = 0  # pushes whose gradients of the network were too old
    bound: Bound = field(default_factory=Bound)
    finished: list[tuple[Request, Answer | FleetError]] = field(default_factory=list)
    load: LoopLoad = field(default_factory=LoopLoad)  # only a server with a loop is looked at
    num_requests: int = 0
    num_by_command: Counter[int] = field(default_factory=Counter)  # requests that could be read; 0: unknown ones
    num_errors: int = 0
    bytes_in: int = 0  # of requests
    bytes_out: int = 0  # of replies
    hot_keys: HotKeys = field(default_factory=HotKeys)
    saves: SavesMade = field(default_factory=SavesMade)
    is_stopping: bool = False
    model: str = ""  # the saved model that was loaded
    now: Callable[[], float] = _monotonic  # the time that the server goes by
    started: float = field(default_factory=time.monotonic)
    say: Callable[[str], None] = _nothing  # a line for the server's log; one within a worker has none

    def __post_init__(self) -> None:
        self.begin_meetings(self.members)

    def begin_meetings(self, members: Members) -> None:
        """Nobody waits for anybody, and these are the workers."""
        self.members, self.barriers, self.gatherings = members, Barriers(members), Gatherings(members)

    def finish(self, request: Request, result: Answer | FleetError) -> None:
        """Answer a request, now or after it was told to wait. What became of a change is settled with that."""
        message = request.message
        if message.sequence and not isinstance(result, ServerBusy):
            outcome = result if isinstance(result, FleetError) else Outcome.APPLIED
            self.sessions.settle(message.client, message.sequence, outcome)
        self.finished.append((request, result))

    def add_table(self, spec: TableSpec) -> None:
        """Make a table, unless there is one of this very description."""
        existing = self.tables.get(spec.number)
        if existing is not None and existing.spec != spec:
            there, asked = differences(existing.spec, spec)
            raise TableError(
                f"table '{existing.spec.name}' exists with {there}, and was asked for with {asked}. All processes of "
                "a job must build the same model and optimizer; for others start the servers anew, or give the table "
                "another name."
            )
        if existing is None:
            if len(self.tables) >= MAX_TABLES:
                raise TableError(f"{MAX_TABLES} tables exist already, which is the limit")
            self.tables[spec.number] = make_table(spec, self.max_table_bytes, self.clock)

    def remake_tables(self) -> None:
        """All tables as they were when they had just been made, and the clock of the machine."""
        self.clock = Clock()
        self.tables = {
            number: make_table(table.spec, self.max_table_bytes, self.clock) for number, table in self.tables.items()
        }

    def table(self, number: int) -> Table:
        """The table that messages call by this number. Raises TableError."""
        found = self.tables.get(number)
        if found is None:
            known = ", ".join(sorted(f"'{table.spec.name}'" for table in self.tables.values())) or "none"
            raise TableError(f"no table with number {number}; known tables: {known}. Create it first.")
        return found
