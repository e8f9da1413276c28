"""What a message means: short functions from (server state, request) to the arrays of the reply.

None of them sees a socket. One that raises FleetError has changed nothing and is answered with its text. None as the
result means: the reply comes later, through `State.finish`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.errors import FleetError, TableError, WireError
from torchfleet.net.wire import (
    DELTA,
    DENSE_BACK,
    MAX_FRAME,
    NO_CREATE,
    SYNC,
    VERSIONS,
    Array,
    Command,
    Role,
    pack,
    unpack,
)
from torchfleet.server.barrier import Barriers
from torchfleet.server.changes import Changes
from torchfleet.server.request import Request
from torchfleet.server.sections import Section, mean_section
from torchfleet.server.sessions import Sessions
from torchfleet.tables.dense import DenseTable
from torchfleet.tables.memory import physical_bytes
from torchfleet.tables.sparse import SparseTable
from torchfleet.tables.spec import TableSpec

MAX_TABLES = 1024
MAX_WORKERS = 1 << 16
MAX_BARRIER_SECONDS = 7 * 24 * 3600.0

Table = SparseTable | DenseTable
Reply = list[Array]


@dataclass
class State:
    """All that a server owns."""

    max_table_bytes: int = field(default_factory=physical_bytes)
    num_workers: int = 0  # ends when so many have left; 0: only on STOP or a signal
    tables: dict[int, Table] = field(default_factory=dict)
    sessions: Sessions = field(default_factory=Sessions)
    barriers: Barriers = field(default_factory=Barriers)
    changes: Changes = field(default_factory=Changes)
    sync_step: dict[int, Request] = field(default_factory=dict)  # this step's pushes so far, by worker
    finished: list[tuple[Request, Reply | FleetError]] = field(default_factory=list)
    num_requests: int = 0
    num_errors: int = 0
    is_stopping: bool = False
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


class BarrierBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    num_workers: int
    timeout: float


def ping(state: State, request: Request) -> Reply:
    return []


def stats(state: State, request: Request) -> Reply:
    tables = {table.spec.name: {"kind": table.spec.kind, **table.stats()} for table in state.tables.values()}
    body = {
        "tables": tables,
        "requests": state.num_requests,
        "errors": state.num_errors,
        "clients": len(state.sessions),
        "uptime": time.monotonic() - state.started,
        "pid": os.getpid(),
    }
    return [pack(body)]


def create_table(state: State, request: Request) -> Reply:
    """Make a table. Making it again with the same description changes nothing; with another one it is an error."""
    spec = unpack(_only(request), TableSpec)
    state.add_table(spec)
    return []


def pull(state: State, request: Request) -> Reply:
    """Per section: rows for keys of a sparse table, or a range (start, stop) of a dense one."""
    _expect_distinct(request.message.arrays)
    sections = [(state.table(array.table), _column(array, np.uint64)) for array in request.message.arrays]
    create = not request.message.flags & NO_CREATE
    num_bytes = sum(_check_pull(table, keys, create) for table, keys in sections)
    if num_bytes > MAX_FRAME:
        raise TableError(f"a reply of {num_bytes:,} bytes is too large for one message: ask for at most {MAX_FRAME:,}")
    reply = []
    for table, keys in sections:
        if isinstance(table, DenseTable):
            reply.append(Array(table.spec.number, table.get(int(keys[0]), int(keys[1])).reshape(-1, 1)))
        else:
            reply.append(Array(table.spec.number, table.pull(keys, create)))
    if request.message.flags & VERSIONS:
        reply.append(Array(0, np.array([[table.step] for table, _ in sections], np.uint64).reshape(-1, 1)))
    return reply


def push(state: State, request: Request) -> Reply | None:
    """One update of each section's table; all sections are checked before the first is applied."""
    flags = request.message.flags
    sections = list(_push_sections(state, request))
    for section in sections:
        section.check()
    if flags & SYNC:
        _keep_for_step(state, request)
        return None
    for section in sections:
        if flags & DELTA:
            section.add()
            state.changes.note(section.table.spec.number, section.keys, request.message.worker)
        else:
            section.apply()
    return _new_dense_values(sections) if flags & DENSE_BACK else []


def _keep_for_step(state: State, request: Request) -> None:
    """Keep a worker's gradients until all workers' are here; whoever waits is answered by `close_sync_step`."""
    _check_worker(state, request)
    if not state.num_workers:
        raise TableError("this server was not told the number of workers, so it cannot wait for all: use num_workers")
    state.sync_step[request.message.worker] = request
    close_sync_step(state)


def close_sync_step(state: State) -> None:
    """If no worker is missing: one update with the mean gradient, summed in the order of the workers."""
    expected = set(range(state.num_workers)) - state.barriers.left
    if not state.sync_step or expected - set(state.sync_step):
        return
    requests = [state.sync_step[worker] for worker in sorted(state.sync_step)]
    state.sync_step = {}
    per_worker = [list(_push_sections(state, request)) for request in requests]
    try:
        merged = [mean_section(list(same_table)) for same_table in zip(*per_worker, strict=True)]
        for section in merged:
            section.check()
        for section in merged:
            section.apply()
    except (FleetError, ValueError) as error:
        text = f"the workers' gradients of this step cannot be put together: {error}"
        for request in requests:
            state.finish(request, TableError(text))
        return
    for request, sections in zip(requests, per_worker, strict=True):
        state.finish(request, _new_dense_values(sections) if request.message.flags & DENSE_BACK else [])


def _new_dense_values(sections: list[Section]) -> Reply:
    tables = [section.table for section in sections if isinstance(section.table, DenseTable)]
    return [Array(table.spec.number, table.get(0, table.size).reshape(-1, 1)) for table in tables]


def pull_changed(state: State, request: Request) -> Reply:
    """Rows of sparse tables that others changed since this worker's last call, and whole dense tables.

    The first array is the number of the last reply that this worker has taken in; a reply that got lost is made
    again. The reply starts with its own number, then per section: keys and rows, or no keys and the block.
    """
    if not request.message.arrays:
        raise WireError("expected the number of the last reply, found no array")
    _check_worker(state, request)
    received = _column(request.message.arrays[0], np.uint64)
    tables = [state.table(array.table) for array in request.message.arrays[1:]]
    if len(received) != 1:
        raise WireError(f"expected the number of the last reply, found {len(received)} numbers")
    names = [table.spec.number for table in tables if isinstance(table, SparseTable)]
    number, changed = state.changes.since(request.message.worker, int(received[0]), names)
    reply = [Array(0, np.array([number], np.uint64))]
    for table in tables:
        keys = changed.get(table.spec.number, np.empty(0, np.uint64))
        values = (
            table.get(0, table.size).reshape(-1, 1) if isinstance(table, DenseTable) else table.pull(keys, create=False)
        )
        reply += [Array(table.spec.number, keys), Array(table.spec.number, values)]
    return reply


def set_values(state: State, request: Request) -> Reply:
    """Overwrite: pairs of arrays, (keys, values) of a sparse table or (start, values) of a dense one."""
    sections = list(_pairs(state, request.message.arrays))
    for table, keys, values in sections:
        if isinstance(table, DenseTable):
            table.check_set(_start(keys), values)
        else:
            table.check_assign(keys, values)
    for table, keys, values in sections:
        if isinstance(table, DenseTable):
            table.set(_start(keys), values)
        else:
            table.assign(keys, values)
    return []


def erase(state: State, request: Request) -> Reply:
    sections = [(state.table(array.table), _column(array, np.uint64)) for array in request.message.arrays]
    for table, keys in sections:
        if isinstance(table, DenseTable):
            raise TableError(f"'{table.spec.name}' is dense: it has no rows to erase")
        table.check_keys(keys)
    for table, keys in sections:
        if isinstance(table, SparseTable):
            table.erase(keys)
    return []


def barrier(state: State, request: Request) -> None:
    body = unpack(_only(request), BarrierBody)
    if not 0 < body.timeout <= MAX_BARRIER_SECONDS or body.num_workers < 1:
        raise WireError(f"a barrier needs a timeout of up to {MAX_BARRIER_SECONDS:g} s and workers, found {body}")
    for going in state.barriers.arrive(body.name, request, body.num_workers, body.timeout, request.arrived):
        state.finish(going, [])


def leave(state: State, request: Request) -> Reply:
    """The worker has done its work: nobody waits for it any more, and after the last one the server ends."""
    _check_worker(state, request)
    for going in state.barriers.leave(request.message.worker):
        state.finish(going, [])
    close_sync_step(state)
    if state.num_workers and len(state.barriers.left) >= state.num_workers:
        state.is_stopping = True
    return []


def stop(state: State, request: Request) -> Reply:
    state.is_stopping = True
    return []


@dataclass(frozen=True)
class Entry:
    """A command: what it does, who may give it, and whether a repeat must not do it again."""

    run: Callable[[State, Request], Reply | None]
    roles: frozenset[Role]
    once: bool = False


_ALL = frozenset(Role)
_FIRST = frozenset({Role.FIRST_WORKER, Role.LAUNCHER})
_LAUNCHER = frozenset({Role.LAUNCHER})

COMMANDS: dict[int, Entry] = {
    Command.PING: Entry(ping, _ALL),
    Command.STATS: Entry(stats, _ALL),
    Command.CREATE_TABLE: Entry(create_table, _FIRST),
    Command.PULL: Entry(pull, _ALL),
    Command.PUSH: Entry(push, _ALL, once=True),
    Command.SET: Entry(set_values, _FIRST, once=True),
    Command.ERASE: Entry(erase, _FIRST, once=True),
    Command.BARRIER: Entry(barrier, _ALL, once=True),
    Command.LEAVE: Entry(leave, _ALL),
    Command.STOP: Entry(stop, _LAUNCHER),
    Command.PULL_CHANGED: Entry(pull_changed, _ALL),
}


def _only(request: Request) -> Array:
    if len(request.message.arrays) != 1:
        raise WireError(f"expected one array, found {len(request.message.arrays)}")
    return request.message.arrays[0]


def _column(array: Array, dtype: npt.DTypeLike) -> npt.NDArray[np.uint64]:
    if array.data.dtype != dtype or array.data.shape[1] != 1:
        raise WireError(f"expected one column of {np.dtype(dtype)}, found {array.data.shape} of {array.data.dtype}")
    return array.data.reshape(-1)


def _floats(array: Array) -> npt.NDArray[np.float32]:
    if array.data.dtype != np.float32:
        raise WireError(f"expected float32 values, found {array.data.dtype}")
    return array.data


def _start(keys: npt.NDArray[np.uint64]) -> int:
    if len(keys) != 1:
        raise WireError(f"expected the element to start at, found {len(keys)} numbers")
    return int(keys[0])


def _check_pull(table: Table, keys: npt.NDArray[np.uint64], create: bool) -> int:
    """Returns the size of the reply in bytes."""
    if isinstance(table, DenseTable):
        if len(keys) != 2:
            raise WireError(
                f"expected a range (start, stop) for dense table '{table.spec.name}', found {len(keys)} numbers"
            )
        table.check_range(int(keys[0]), int(keys[1]))
    else:
        table.check_keys(keys, create)
    size = int(keys[1] - keys[0]) if isinstance(table, DenseTable) else len(keys) * table.spec.dim
    return 4 * size


def _check_worker(state: State, request: Request) -> None:
    num_workers = state.num_workers or MAX_WORKERS
    if request.message.worker >= num_workers:
        raise WireError(f"there are {num_workers} workers, numbered from 0; found number {request.message.worker}")


def _expect_distinct(arrays: list[Array]) -> None:
    if len({array.table for array in arrays}) < len(arrays):
        raise WireError("a table appears twice in one message: put its keys together")


def _pairs(
    state: State, arrays: list[Array]
) -> Iterator[tuple[Table, npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
    if len(arrays) % 2:
        raise WireError(f"expected pairs of keys and values, found {len(arrays)} arrays")
    if len({array.table for array in arrays}) * 2 < len(arrays):
        raise WireError("a table appears twice in one message: put its keys together")
    for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
        if keys.table != values.table:
            raise WireError(f"keys for table {keys.table} are followed by values for table {values.table}")
        yield state.table(keys.table), _column(keys, np.uint64), _floats(values)


def _push_sections(state: State, request: Request) -> Iterator[Section]:
    """The first array holds per section a learning rate (NaN: the table's own) and, if the client knows it, the
    number of updates that the table had seen when its rows were pulled; then come keys and gradients."""
    if not request.message.arrays:
        raise WireError("expected learning rates, found no array")
    rates = request.message.arrays[0].data
    if rates.dtype != np.float64 or rates.shape[1] not in (1, 2):
        raise WireError(f"expected learning rates, one or two columns of float64, found {rates.shape} of {rates.dtype}")
    pairs = list(_pairs(state, request.message.arrays[1:]))
    if len(rates) != len(pairs):
        raise WireError(f"{len(rates)} learning rates for {len(pairs)} sections")
    for rate, (table, keys, grads) in zip(rates, pairs, strict=True):
        version = rate[1] if len(rate) == 2 and np.isfinite(rate[1]) else None
        yield Section(table, keys, grads, None if np.isnan(rate[0]) else float(rate[0]), version)
