"""The state of a server: its tables, clients, workers, pushes, long work and saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchfleet.base.errors import FleetError, ServerBusy, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.server.grouped_tables import GroupedTables
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.meeting.bound import Bound
from torchfleet.ps.server.meeting.meetings import Meetings
from torchfleet.ps.server.state.budgets import Budgets
from torchfleet.ps.server.state.changes import Changes
from torchfleet.ps.server.state.claims import MAX_TABLES
from torchfleet.ps.server.state.counters import Counters
from torchfleet.ps.server.state.saves import Saves
from torchfleet.ps.server.state.sessions import Outcome, Sessions
from torchfleet.ps.server.state.subscriptions import Subscriptions
from torchfleet.ps.server.state.work_queue import WorkQueue
from torchfleet.ps.tables.kinds import make_table
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.spec import TableSpec, differences
from torchfleet.ps.tables.settings.storage import default_storage
from torchfleet.ps.tables.table import Table


def _nothing(text: str) -> None:
    pass


def _monotonic() -> float:
    return time.monotonic()  # looked up at the call: a simulation replaces time.monotonic


@dataclass
class Pushes:
    """Pushes that are not applied on arrival, and counters of applied ones."""

    step: dict[int, Request] = field(default_factory=dict)  # of the current sync step, by worker
    num_steps: int = 0  # sync steps made so far
    gathered: list[Request] = field(default_factory=list)  # pushes to apply in one update
    bound: Bound = field(default_factory=Bound)  # pushes held to bound the staleness of other workers
    num_dropped: int = 0  # pushes whose dense gradients exceeded the maximum staleness
    changes: Changes = field(default_factory=Changes)  # rows that each worker has not seen yet (geo training)


@dataclass
class State:
    """All that a server owns."""

    max_table_bytes: int
    num_workers: int = 0  # the server stops when this many have left; 0: only on STOP or a signal
    tables: dict[int, Table] = field(default_factory=dict)
    grouped: GroupedTables = field(default_factory=GroupedTables)  # tables that requests name together
    clock: Clock = field(default_factory=Clock)  # of the tables
    sessions: Sessions = field(default_factory=Sessions)
    budgets: Budgets = field(default_factory=Budgets)
    meetings: Meetings = field(default_factory=Meetings)
    pushes: Pushes = field(default_factory=Pushes)
    work: WorkQueue = field(init=False)
    saves: Saves = field(default_factory=Saves)
    subscriptions: Subscriptions = field(default_factory=Subscriptions)
    counters: Counters = field(default_factory=Counters)
    finished: list[tuple[Request, Answer | FleetError]] = field(default_factory=list)  # with replies to send
    is_following: bool = False  # the server applies entries of another server, or of its own log
    is_stopping: bool = False
    has_moved: bool = False  # the state is of a log or of another server: rows may lie elsewhere than processes say
    served: dict[str, Any] | None = None  # of a read-only server: the saved model and the shard that it serves
    has_backup: bool | None = None  # of the primary of a server with replicas; None: no replicas, or it is a backup
    now: Callable[[], float] = _monotonic  # the server's clock
    say: Callable[[str], None] = _nothing  # writes a line to the server's log; a server within a worker has no log

    def __post_init__(self) -> None:
        self.work = WorkQueue(self.budgets)

    def finish(self, request: Request, result: Answer | FleetError) -> None:
        """Answer a request, now or after it has waited. This settles the outcome of a change."""
        message = request.message
        if message.sequence and not isinstance(result, ServerBusy):
            outcome = result if isinstance(result, FleetError) else Outcome.APPLIED
            self.sessions.settle(message.client, message.sequence, outcome)
        self.finished.append((request, result))

    def add_table(self, spec: TableSpec) -> None:
        """Make a table, unless there is one with the same description."""
        if spec.number in self.tables:
            self.check_same(spec)
        else:
            if len(self.tables) >= MAX_TABLES:
                raise TableError(f"{MAX_TABLES} tables exist already, which is the limit")
            self.tables[spec.number] = self._made(spec)
            self.watch_tables()

    def check_same(self, spec: TableSpec) -> None:
        """Raise TableError unless there is a table with this description."""
        existing = self.table(spec.number)
        if existing.spec == spec:
            return
        there, asked = differences(existing.spec, spec)
        if not (self.has_moved and existing.spec.has_rows_of(spec)):
            raise TableError(
                f"table '{existing.spec.name}' exists with {there}, and was asked for with {asked}. All processes of "
                "a job must build the same model and optimizer; for others start the servers anew, or give the table "
                "another name."
            )
        if not self.is_following:
            self.say(f"table '{spec.name}' stays where it is: {there}; asked for {asked}")

    def close_tables(self) -> None:
        """Release what tables hold outside of memory. The server is not used afterwards."""
        for table in self.tables.values():
            table.close()

    def remake_tables(self) -> None:
        """Make all tables anew, empty, and return to the machine's clock."""
        self.clock = Clock()
        self.subscriptions.forget()
        self.close_tables()
        specs, self.tables = [table.spec for table in self.tables.values()], {}  # frees the old tables' memory first
        self.tables = {spec.number: self._made(spec) for spec in specs}

    def _made(self, spec: TableSpec) -> Table:
        storage = default_storage()
        if self.is_following and storage.memory and spec.storage.memory:
            # from the log of a server, or the state of another one, whose disk this one need not have
            spec = msgspec.structs.replace(spec, storage=storage)
        return make_table(spec, self.max_table_bytes, self.clock, storage)

    def watch_tables(self) -> None:
        """Let the tables report their changes while there are subscribers, and only then."""
        watch = self.subscriptions.note if len(self.subscriptions) else None
        for table in self.tables.values():
            table.watch = watch

    def table(self, number: int) -> Table:
        """The table with this number in messages. Raises TableError if no table has it."""
        found = self.tables.get(number)
        if found is None:
            known = ", ".join(sorted(f"'{table.spec.name}'" for table in self.tables.values())) or "none"
            raise TableError(f"no table with number {number}; known tables: {known}. Create it first.")
        return found
