"""The commands of a server: short functions from (server state, request) to the arrays of the reply.

A command never sees a socket. If it raises FleetError, it has changed nothing, and the reply is the error's text. If it
returns None, the reply comes later, through `State.finish`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller

import numpy as np

from torchfleet import __version__
from torchfleet.base.errors import FleetError, TableError, WireError
from torchfleet.base.process_place import own_place
from torchfleet.ps.net.joined_arrays import JoinedArrays
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import (
    BOUNDED,
    DELTA,
    DENSE_BACK,
    GATHERED,
    MAX_BODY,
    MAX_FRAME,
    NO_CREATE,
    STATE,
    SYNC,
    VERSIONS,
    WRITTEN,
    Array,
    Command,
    Role,
    pack,
    unpack,
)
from torchfleet.ps.server.among_workers import barrier, files, gather, join, leave, send, starting, take
from torchfleet.ps.server.arrays import (
    check_worker,
    checked_sections,
    column,
    given_steps,
    key_sections,
    only,
    pairs,
    push_sections,
)
from torchfleet.ps.server.exchange import enter, exchange
from torchfleet.ps.server.grouped_tables import pull_grouped, push_grouped
from torchfleet.ps.server.job.given_tables import MAX_BYTES, GivenTables
from torchfleet.ps.server.kept_pushes import Checked, answer, apply_gathered, bounded_push, gather_push
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.long_work import check_queue, in_slices, inspect, set_clock, shrink_tables, walk
from torchfleet.ps.server.saves.changed_rows import subscribe
from torchfleet.ps.server.saves.table_saving import SaveBody, save_in_slices
from torchfleet.ps.server.sections import Section
from torchfleet.ps.server.sliced_pull import PulledKeys, begin_long_pull, pulled, pulls_long, steps_of
from torchfleet.ps.server.state.counters import HotKeys
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.sync_step import keep_for_step
from torchfleet.ps.tables.settings.spec import TableSpec

MAX_CHANGED = 1 << 24  # numbers of one table in a reply to PULL_CHANGED: 64 MB


def ping(state: State, request: Request) -> Answer:
    return []


def stats(state: State, request: Request) -> Answer:
    tables = {table.spec.name: table.described() for table in state.tables.values()}
    body = {
        "tables": tables,
        "model": state.saves.model,
        "requests": state.counters.num_requests,
        "errors": state.counters.num_errors,
        "busy": state.counters.load.busy,
        "gathered": len(state.pushes.gathered),
        "dropped": state.pushes.num_dropped,
        "clients": len(state.sessions),
        "workers": state.meetings.presence.describe(request.arrived),
        "members": state.meetings.members.describe(state.num_workers),
        "steps": state.pushes.num_steps,
        "uptime": time.monotonic() - state.counters.started,
        "pid": own_place().pid,
        "release": __version__,
        **({"quorum": state.meetings.quorum.stats()} if state.meetings.quorum.number else {}),
        **({} if state.served is None else {"served": state.served}),
        **({} if state.has_backup is None else {"has_backup": state.has_backup}),
    }
    return [pack(body)]


def create_table(state: State, request: Request) -> Answer:
    """Make a table. A repeat with the same description changes nothing; one with another description is an error."""
    spec = unpack(only(request), TableSpec, MAX_BODY)
    num_before = len(state.tables)
    state.add_table(spec)
    if len(state.tables) > num_before:
        state.say(f"table '{spec.name}' is made")
    return []


def given_tables(state: State, request: Request) -> Answer:
    """Check a repeat of TABLES: a server that runs commands has its tables already. Raises TableError if a table that
    the request describes is missing, or differs."""
    for spec in unpack(only(request), GivenTables, MAX_BYTES).tables:
        state.check_same(spec)
    return []


def pull(state: State, request: Request) -> Answer | None:
    """Per section: rows for keys of a sparse table, or a range (start, stop) of a dense one."""
    arrays, flags = request.message.arrays, request.message.flags
    grouped = _pull_together(state, arrays, flags) if isinstance(arrays, JoinedArrays) else None
    return _pull(state, request, create=not flags & NO_CREATE) if grouped is None else grouped


def pull_again(state: State, request: Request) -> Answer | None:
    """Repeat a pull whose reply was lost. It neither counts keys nor creates rows a second time."""
    return _pull(state, request, create=False, is_repeat=True)


def _pull_together(state: State, arrays: JoinedArrays, flags: int) -> Answer | None:
    """The reply to a pull of existing rows from many small tables; None if it must be made table by table."""
    reply = pull_grouped(state.grouped, state.tables, arrays, flags)
    if reply is not None and state.counters.hot_keys.is_on:
        _note_hot_keys(state.counters.hot_keys, key_sections(state, arrays))
    return reply


def _pull(state: State, request: Request, create: bool, is_repeat: bool = False) -> Answer | None:
    message = request.message
    sections = key_sections(state, message.arrays)
    worker = message.worker if message.flags & SYNC and state.num_workers > 1 else None
    if create:
        state.budgets.check_new_rows(request.peer, request.arrived)
    if state.counters.hot_keys.is_on:
        _note_hot_keys(state.counters.hot_keys, sections)
    is_long = pulls_long(state, request, sections, create)
    _check_size(sections, message.flags, create, is_long)
    is_bounded = bool(message.flags & BOUNDED)
    if is_bounded:
        check_worker(state, request)
    if is_long:
        begin_long_pull(state, request, sections, create, worker)  # refuses it before anything has changed
    if is_bounded and not is_repeat:  # the worker may have pushed since: no other push may wait for it then
        state.pushes.bound.begin(message.worker)
    if is_long:
        return None
    reply, num_keys, num_new = [], 0, 0
    for array, (table, keys) in zip(message.arrays, sections, strict=True):
        before = table.num_rows
        reply.append(Array(array.number, pulled(table, message.flags)(keys, create, worker)))
        num_keys, num_new = num_keys + len(keys), num_new + table.num_rows - before
    if num_new:
        state.budgets.note_pull(request.peer, num_keys, num_new, request.arrived)
    if message.flags & VERSIONS:
        reply.append(steps_of(sections))
    return reply


def _check_size(sections: Sequence[PulledKeys], flags: int, create: bool, is_long: bool) -> None:
    """Raise TableError if a table cannot be pulled from, or the reply would be too large."""
    num_bytes = 0
    for table, keys in sections:
        if is_long and not table.spec.is_dense:  # the pull checks each slice itself
            num_bytes += 4 * len(keys) * table.spec.dim
        else:
            num_bytes += table.check_pull(keys, create)
        if flags & STATE and not table.spec.is_dense:
            num_bytes += 4 * len(keys) * (table.spec.num_words - table.spec.dim)
    if num_bytes > MAX_FRAME:
        raise TableError(f"a reply of {num_bytes:,} bytes is too large for one message: ask for at most {MAX_FRAME:,}")


def _note_hot_keys(hot_keys: HotKeys, sections: Sequence[PulledKeys]) -> None:
    for table, keys in sections:
        if not table.spec.is_dense:
            hot_keys.note(table.spec.name, keys)


def push(state: State, request: Request) -> Answer | FleetError | None:
    """Update each section's table once. All sections are checked before the first is applied."""
    flags = request.message.flags
    kind = flags & (SYNC | DELTA | GATHERED | BOUNDED)
    if flags & WRITTEN and not kind & ~DELTA:
        return _write(state, request)
    if kind.bit_count() > 1:
        raise WireError(f"flags {flags}: a push may have at most one of SYNC, DELTA, GATHERED and BOUNDED")
    if flags & WRITTEN:
        raise WireError(f"flags {flags}: a push of WRITTEN values may have DELTA, and no other kind")
    if kind == DELTA:
        return _add(state, request)
    # the mean of several pushes is made table by table
    is_alone = kind in (0, BOUNDED) or (kind == SYNC and state.num_workers == 1)
    grouped = push_grouped(state.grouped, state.tables, request) if is_alone else None
    if grouped is None:  # a push to grouped tables creates no rows
        state.budgets.check_new_rows(request.peer, request.arrived)
    sections = checked_sections(state, request, grouped)
    if kind == SYNC:
        keep_for_step(state, request, sections)
        return None
    if kind == BOUNDED:
        return bounded_push(state, request, sections)
    if kind == GATHERED:
        return gather_push(state, request, sections)
    return _applied(state, request, sections, methodcaller("apply"))


def _add(state: State, request: Request) -> Answer:
    """A push of differences."""
    state.budgets.check_new_rows(request.peer, request.arrived)
    sections = push_sections(state, request)
    for section in sections:
        section.table.check_add(section.keys, section.grads)

    def add(section: Section) -> None:
        section.table.add(section.keys, section.grads)
        state.pushes.changes.note(section.table.spec.number, section.keys, request.message.worker)

    return _applied(state, request, sections, add)


def _write(state: State, request: Request) -> Answer:
    """A push of values that a script has written into dense parameters, or of differences."""
    are_differences = bool(request.message.flags & DELTA)
    sections = push_sections(state, request)
    for section in sections:
        section.table.check_write(section.keys, section.grads, are_differences)
    for section in sections:
        section.table.write(section.keys, section.grads, are_differences)
    return []


def _applied(state: State, request: Request, sections: Sequence[Checked], apply: Callable[[Checked], None]) -> Answer:
    """Apply checked sections, and charge the rows that they create to the client's budget."""
    num_new = 0
    for section in sections:
        before = section.table.num_rows
        apply(section)
        num_new += section.table.num_rows - before
    if num_new:
        state.budgets.note_new_rows(request.peer, num_new, request.arrived)
    return answer(request, sections) if request.message.flags & DENSE_BACK else []


def pull_changed(state: State, request: Request) -> Answer:
    """Rows of sparse tables that other workers changed since this worker's last call, and whole dense tables.

    The first array is the number of the last reply that this worker received; if a later reply was lost, the server
    builds it again. The reply starts with its own number and the number of rows it had no room for; the next reply has
    those rows. Then follow, per section, keys and rows of a sparse table, or no keys and the block of a dense table.
    """
    if not request.message.arrays:
        raise WireError("expected the number of the last reply, found no array")
    check_worker(state, request)
    received = column(request.message.arrays[0], np.uint64)
    tables = [state.table(array.number) for array in request.message.arrays[1:]]
    if len(received) != 1:
        raise WireError(f"expected the number of the last reply, found {len(received)} numbers")
    if not received[0]:  # 0 resets the worker's records: refuse a late copy of its previous process's request
        state.meetings.presence.check_joined(request.message.worker, request.message.incarnation)
    most = {table.spec.number: max(1, MAX_CHANGED // table.spec.dim) for table in tables if not table.spec.is_dense}
    message = request.message
    number, changed, rest = state.pushes.changes.since(message.worker, int(received[0]), most, message.client)
    reply = [Array(0, np.array([number, rest], np.uint64))]
    for table in tables:
        keys = changed.get(table.spec.number, np.empty(0, np.uint64))
        whole = table.whole()
        values = table.pull(keys, False, None) if whole is None else whole
        reply += [Array(table.spec.number, keys), Array(table.spec.number, values)]
    return reply


def set_values(state: State, request: Request) -> Answer:
    """Overwrite values. The arrays are pairs: (keys, values) of a sparse table or (start, values) of a dense one. With
    flag STATE, the step of each table follows; with NO_CREATE too, the values are the state alone, of rows that exist.
    """
    arrays, has_steps = request.message.arrays, bool(request.message.flags & STATE)
    sections = pairs(state, arrays[:-1] if has_steps else arrays)
    steps = given_steps(arrays[-1:], len(sections)) if has_steps else []
    if has_steps and request.message.flags & NO_CREATE:
        for table, keys, states in sections:
            table.check_assign_state(keys, states)
        for table, keys, states in sections:
            table.assign_state(keys, states)
    else:
        for table, keys, values in sections:
            table.check_assign(keys, values)
        for table, keys, values in sections:
            table.assign(keys, values)
    for (table, _, _), step in zip(sections, steps, strict=False):
        table.step = step
    return []


def erase(state: State, request: Request) -> Answer:
    """Drop rows. The request has one array of keys per table."""
    sections = [(state.table(array.number), column(array, np.uint64)) for array in request.message.arrays]
    for table, keys in sections:
        table.check_erase(keys)
    for table, keys in sections:
        table.erase(keys)
    return []


def save(state: State, request: Request) -> Answer | FleetError | None:
    """Write this server's share of the model to files. The reply names the files, and comes when all are on disk.

    A repeat of the request gets the same answer.
    """
    body = unpack(only(request), SaveBody, MAX_BODY)
    if not re.fullmatch(r"save-[0-9]{1,18}", body.folder):
        raise WireError(f"expected a folder save-NUMBER, found {body.folder!r}")
    check_queue(state, request, body.token)  # before anything changes
    error = apply_gathered(state)  # gathered pushes were acknowledged, so the saved model must contain them
    if error is not None:
        return error
    return in_slices(state, request, body.token, lambda long: save_in_slices(state, long, body))


def stop(state: State, request: Request) -> Answer:
    state.is_stopping = True
    return []


@dataclass(frozen=True)
class CommandHandler:
    """How a command is served: its function, the roles that may send it, and how a repeat is handled."""

    run: Callable[[State, Request], Answer | FleetError | None]
    roles: frozenset[Role]
    once: bool = False  # a repeat does not run the command again
    again: Callable[[State, Request], Answer | None] | None = None  # runs for a repeat; None: the reply is empty
    as_worker: bool = False  # if a process has joined as the message's worker, only that process may send it
    as_worker_flags: int = 0  # as `as_worker`, for messages with one of these flags


_ALL = frozenset({Role.WORKER, Role.FIRST_WORKER, Role.LAUNCHER})
_FIRST = frozenset({Role.FIRST_WORKER, Role.LAUNCHER})
_LAUNCHER = frozenset({Role.LAUNCHER})

COMMANDS: dict[int, CommandHandler] = {
    Command.PING: CommandHandler(ping, _ALL),
    Command.STATS: CommandHandler(stats, _ALL),
    Command.CREATE_TABLE: CommandHandler(create_table, _FIRST),
    Command.PULL: CommandHandler(pull, _ALL, again=pull_again, as_worker_flags=SYNC | BOUNDED),
    Command.PUSH: CommandHandler(push, _ALL, once=True, as_worker_flags=SYNC | BOUNDED),
    Command.SET: CommandHandler(set_values, _FIRST, once=True),
    Command.ERASE: CommandHandler(erase, _FIRST, once=True),
    Command.BARRIER: CommandHandler(barrier, _ALL, once=True, as_worker=True),
    Command.LEAVE: CommandHandler(leave, _ALL),
    Command.STOP: CommandHandler(stop, _LAUNCHER),
    Command.PULL_CHANGED: CommandHandler(pull_changed, _ALL),
    Command.GATHER: CommandHandler(gather, _ALL, as_worker=True),
    Command.SEND: CommandHandler(send, _ALL, as_worker=True),
    Command.TAKE: CommandHandler(take, _ALL, as_worker=True),
    Command.FILES: CommandHandler(files, _ALL, as_worker=True),
    Command.SAVE: CommandHandler(save, _FIRST),
    Command.CLOCK: CommandHandler(set_clock, _FIRST),
    Command.SHRINK: CommandHandler(shrink_tables, _FIRST),
    Command.INSPECT: CommandHandler(inspect, _ALL),
    Command.JOIN: CommandHandler(join, _ALL),
    Command.WALK: CommandHandler(walk, _ALL),
    Command.TABLES: CommandHandler(given_tables, _FIRST),
    Command.SUBSCRIBE: CommandHandler(subscribe, _ALL),
    Command.EXCHANGE: CommandHandler(exchange, _ALL, as_worker=True),
    Command.ENTER: CommandHandler(enter, _ALL, as_worker=True),
    Command.STARTING: CommandHandler(starting, _ALL),
}
