"""All that a server owns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchfleet.errors import FleetError, TableError
from torchfleet.net.wire import Array
from torchfleet.server.barrier import Barriers
from torchfleet.server.changes import Changes
from torchfleet.server.files import FileLists
from torchfleet.server.gathering import Gatherings
from torchfleet.server.mail import Mail
from torchfleet.server.request import Request
from torchfleet.server.sessions import Sessions
from torchfleet.tables.dense import DenseTable
from torchfleet.tables.memory import physical_bytes
from torchfleet.tables.sparse import SparseTable
from torchfleet.tables.spec import TableSpec

MAX_TABLES = 1024

Table = SparseTable | DenseTable
Reply = list[Array]


@dataclass
class Saving:
    """A save that is under way or done: who is to be told, and what."""

    request: Request
    result: Reply | FleetError | None = None


@dataclass
class State:
    """All that a server owns."""

    max_table_bytes: int = field(default_factory=physical_bytes)
    num_workers: int = 0  # ends when so many have left; 0: only on STOP or a signal
    tables: dict[int, Table] = field(default_factory=dict)
    sessions: Sessions = field(default_factory=Sessions)
    barriers: Barriers = field(default_factory=Barriers)
    changes: Changes = field(default_factory=Changes)
    gatherings: Gatherings = field(default_factory=Gatherings)
    mail: Mail = field(default_factory=Mail)
    files: FileLists = field(default_factory=FileLists)
    saves: dict[int, Saving] = field(default_factory=dict)  # by token
    jobs: deque[Iterator[bool]] = field(default_factory=deque)  # long work, done in slices between requests
    sync_step: dict[int, Request] = field(default_factory=dict)  # this step's pushes so far, by worker
    finished: list[tuple[Request, Reply | FleetError]] = field(default_factory=list)
    num_requests: int = 0
    num_errors: int = 0
    is_stopping: bool = False
    model: str = ""  # the saved model that was loaded
    started: float = field(default_factory=time.monotonic)

    def finish(self, request: Request, result: Reply | FleetError) -> None:
        """Answer a request that was told to wait."""
        self.finished.append((request, result))

    def add_table(self, spec: TableSpec) -> None:
        existing = self.tables.get(spec.number)
        if existing is not None and existing.spec != spec:
            raise TableError(f"table '{existing.spec.name}' exists as {existing.spec}, and was asked for as {spec}")
        if existing is None:
            if len(self.tables) >= MAX_TABLES:
                raise TableError(f"{MAX_TABLES} tables exist already, which is the limit")
            make = DenseTable if spec.kind == "dense" else SparseTable
            self.tables[spec.number] = make(spec, self.max_table_bytes)

    def table(self, number: int) -> Table:
        found = self.tables.get(number)
        if found is None:
            known = ", ".join(sorted(f"'{table.spec.name}'" for table in self.tables.values())) or "none"
            raise TableError(f"no table with number {number}; known tables: {known}. Create it first.")
        return found
