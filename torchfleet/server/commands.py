"""What a message means: short functions from (server state, request) to the arrays of the reply.

None of them sees a socket. One that raises FleetError has changed nothing and is answered with its text. None as the
result means: the reply comes later, through `State.finish`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

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
from torchfleet.server.arrays import (
    MAX_WORKERS,
    check_pull,
    check_worker,
    column,
    expect_distinct,
    only,
    pairs,
    push_sections,
    start,
)
from torchfleet.server.files import FilesBody
from torchfleet.server.gathering import GatherBody
from torchfleet.server.mail import SendBody, TakeBody
from torchfleet.server.request import Request
from torchfleet.server.saving import MAX_SAVES, SaveBody, save_in_slices
from torchfleet.server.sections import Section, mean_section
from torchfleet.server.state import Reply, Saving, State
from torchfleet.tables.dense import DenseTable
from torchfleet.tables.sparse import SparseTable
from torchfleet.tables.spec import TableSpec

MAX_BARRIER_SECONDS = 7 * 24 * 3600.0


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
        "model": state.model,
        "requests": state.num_requests,
        "errors": state.num_errors,
        "clients": len(state.sessions),
        "uptime": time.monotonic() - state.started,
        "pid": os.getpid(),
    }
    return [pack(body)]


def create_table(state: State, request: Request) -> Reply:
    """Make a table. Making it again with the same description changes nothing; with another one it is an error."""
    spec = unpack(only(request), TableSpec)
    state.add_table(spec)
    return []


def pull(state: State, request: Request) -> Reply:
    """Per section: rows for keys of a sparse table, or a range (start, stop) of a dense one."""
    expect_distinct(request.message.arrays)
    sections = [(state.table(array.table), column(array, np.uint64)) for array in request.message.arrays]
    create = not request.message.flags & NO_CREATE
    num_bytes = sum(check_pull(table, keys, create) for table, keys in sections)
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
    sections = list(push_sections(state, request))
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
    check_worker(state, request)
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
    per_worker = [list(push_sections(state, request)) for request in requests]
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
    check_worker(state, request)
    received = column(request.message.arrays[0], np.uint64)
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
    sections = list(pairs(state, request.message.arrays))
    for table, keys, values in sections:
        if isinstance(table, DenseTable):
            table.check_set(start(keys), values)
        else:
            table.check_assign(keys, values)
    for table, keys, values in sections:
        if isinstance(table, DenseTable):
            table.set(start(keys), values)
        else:
            table.assign(keys, values)
    return []


def erase(state: State, request: Request) -> Reply:
    sections = [(state.table(array.table), column(array, np.uint64)) for array in request.message.arrays]
    for table, keys in sections:
        if isinstance(table, DenseTable):
            raise TableError(f"'{table.spec.name}' is dense: it has no rows to erase")
        table.check_keys(keys)
    for table, keys in sections:
        if isinstance(table, SparseTable):
            table.erase(keys)
    return []


def barrier(state: State, request: Request) -> None:
    body = unpack(only(request), BarrierBody)
    if not 0 < body.timeout <= MAX_BARRIER_SECONDS or body.num_workers < 1:
        raise WireError(f"a barrier needs a timeout of up to {MAX_BARRIER_SECONDS:g} s and workers, found {body}")
    for going in state.barriers.arrive(body.name, request, body.num_workers, body.timeout, request.arrived):
        state.finish(going, [])


def gather(state: State, request: Request) -> None:
    """What every worker brought, to every worker, once all are there."""
    body = unpack(_bodies(request, 2)[0], GatherBody)
    if not 0 < body.timeout <= MAX_BARRIER_SECONDS or body.num_workers < 1:
        raise WireError(f"a gathering needs a timeout of up to {MAX_BARRIER_SECONDS:g} s and workers, found {body}")
    for going, reply in state.gatherings.arrive(body, request):
        state.finish(going, reply)


def send(state: State, request: Request) -> Reply:
    """Keep a parcel for another worker. The reply is 1, or 0 if there was no room: then it must be sent again."""
    check_worker(state, request)
    body = unpack(_bodies(request, 2)[0], SendBody)
    if not 0 <= body.to < (state.num_workers or MAX_WORKERS):
        raise WireError(f"no worker has number {body.to}")
    accepted = state.mail.send(request.message.worker, body, request.message.arrays[1:])
    return [Array(0, np.array([accepted], np.uint64))]


def take(state: State, request: Request) -> Reply:
    """Parcels for this worker: each its number and the count of its arrays, then these."""
    check_worker(state, request)
    reply = []
    for number, parcel in state.mail.take(request.message.worker, unpack(only(request), TakeBody)):
        reply += [Array(0, np.array([number, len(parcel)], np.uint64)), *parcel]
    return reply


def files(state: State, request: Request) -> Reply:
    """Take the next file of a list, and say which ones are done."""
    check_worker(state, request)
    body = unpack(only(request), FilesBody)
    if not 0 < body.lease <= MAX_BARRIER_SECONDS:
        raise WireError(f"a lease is up to {MAX_BARRIER_SECONDS:g} seconds, found {body.lease}")
    state.files.expire(request.arrived)
    message = request.message
    return [pack(state.files.ask(message.client, message.worker, body, request.arrived))]


def save(state: State, request: Request) -> Reply | FleetError | None:
    """Write this server's share of the model to files; the reply, which says to which, comes when all are on disk.

    A repeat of the request gets the same answer.
    """
    body = unpack(only(request), SaveBody)
    if not re.fullmatch(r"save-[0-9]{1,18}", body.folder):
        raise WireError(f"expected a folder save-NUMBER, found {body.folder!r}")
    known = state.saves.get(body.token)
    if known is None:
        known = state.saves[body.token] = Saving(request)
        state.jobs.append(save_in_slices(state, known, body))
        while len(state.saves) > MAX_SAVES:
            state.saves.pop(next(iter(state.saves)))
        return None
    known.request = request
    return known.result


def leave(state: State, request: Request) -> Reply:
    """The worker has done its work: nobody waits for it any more, and after the last one the server ends."""
    check_worker(state, request)
    for going in state.barriers.leave(request.message.worker):
        state.finish(going, [])
    for going, reply in state.gatherings.leave(request.message.worker):
        state.finish(going, reply)
    state.files.leave(request.message.worker)
    close_sync_step(state)
    if state.num_workers and len(state.barriers.left) >= state.num_workers:
        state.is_stopping = True
    return []


def stop(state: State, request: Request) -> Reply:
    state.is_stopping = True
    return []


def _bodies(request: Request, at_least: int) -> list[Array]:
    if len(request.message.arrays) < at_least:
        raise WireError(f"expected at least {at_least} arrays, found {len(request.message.arrays)}")
    return request.message.arrays


@dataclass(frozen=True)
class Entry:
    """A command: what it does, who may give it, and whether a repeat must not do it again."""

    run: Callable[[State, Request], Reply | FleetError | None]
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
    Command.GATHER: Entry(gather, _ALL),
    Command.SEND: Entry(send, _ALL),
    Command.TAKE: Entry(take, _ALL),
    Command.FILES: Entry(files, _ALL),
    Command.SAVE: Entry(save, _FIRST),
}
