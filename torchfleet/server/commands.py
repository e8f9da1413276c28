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
from torchfleet.net.wire import MAX_FRAME, NO_CREATE, Array, Command, Role, pack, unpack
from torchfleet.server.barrier import Barriers
from torchfleet.server.request import Request
from torchfleet.server.sessions import Sessions
from torchfleet.tables.dense import DenseTable
from torchfleet.tables.memory import physical_bytes
from torchfleet.tables.sparse import SparseTable
from torchfleet.tables.spec import TableSpec

MAX_TABLES = 1024
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
    finished: list[tuple[Request, Reply | FleetError]] = field(default_factory=list)
    num_requests: int = 0
    num_errors: int = 0
    is_stopping: bool = False
    started: float = field(default_factory=time.monotonic)

    def finish(self, request: Request, result: Reply | FleetError) -> None:
        """Answer a request that was told to wait."""
        self.finished.append((request, result))

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
    existing = state.tables.get(spec.number)
    if existing is not None and existing.spec != spec:
        raise TableError(f"table '{existing.spec.name}' exists as {existing.spec}, and was asked for as {spec}")
    if existing is None:
        if len(state.tables) >= MAX_TABLES:
            raise TableError(f"{MAX_TABLES} tables exist already, which is the limit")
        make = DenseTable if spec.kind == "dense" else SparseTable
        state.tables[spec.number] = make(spec, state.max_table_bytes)
    return []


def pull(state: State, request: Request) -> Reply:
    """Per section: rows for keys of a sparse table, or a range (start, stop) of a dense one."""
    sections = [(state.table(array.table), _column(array, np.uint64)) for array in request.message.arrays]
    create = not request.message.flags & NO_CREATE
    for table, keys in sections:
        _check_pull(table, keys, create)
    reply = []
    for table, keys in sections:
        if isinstance(table, DenseTable):
            reply.append(Array(table.spec.number, table.get(int(keys[0]), int(keys[1])).reshape(-1, 1)))
        else:
            reply.append(Array(table.spec.number, table.pull(keys, create)))
    return reply


def push(state: State, request: Request) -> Reply:
    """One update of each section's table; all sections are checked before the first is applied."""
    sections = list(_push_sections(state, request))
    for table, keys, grads, rate in sections:
        if isinstance(table, DenseTable):
            table.check_push(grads, rate)
        else:
            table.check_push(keys, grads, rate)
    for table, keys, grads, rate in sections:
        if isinstance(table, DenseTable):
            table.push(grads, rate)
        else:
            table.push(keys, grads, rate)
    return []


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
    for going in state.barriers.leave(request.message.worker):
        state.finish(going, [])
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


def _check_pull(table: Table, keys: npt.NDArray[np.uint64], create: bool) -> None:
    if isinstance(table, DenseTable):
        if len(keys) != 2:
            raise WireError(
                f"expected a range (start, stop) for dense table '{table.spec.name}', found {len(keys)} numbers"
            )
        table.check_range(int(keys[0]), int(keys[1]))
    else:
        table.check_keys(keys, create)
    size = int(keys[1] - keys[0]) if isinstance(table, DenseTable) else len(keys) * table.spec.dim
    if 4 * size > MAX_FRAME:
        raise TableError(f"a reply of {4 * size:,} bytes is too large for one message: ask for at most {MAX_FRAME:,}")


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


def _push_sections(
    state: State, request: Request
) -> Iterator[tuple[Table, npt.NDArray[np.uint64], npt.NDArray[np.float32], float | None]]:
    """The first array holds a learning rate per section (NaN: the table's own), then come keys and gradients."""
    if not request.message.arrays:
        raise WireError("expected learning rates, found no array")
    rates = _column(request.message.arrays[0], np.float64)
    sections = list(_pairs(state, request.message.arrays[1:]))
    if len(rates) != len(sections):
        raise WireError(f"{len(rates)} learning rates for {len(sections)} sections")
    for rate, (table, keys, grads) in zip(rates, sections, strict=True):
        yield table, keys, grads, None if np.isnan(rate) else float(rate)
