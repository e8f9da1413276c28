"""Requests over whole tables. The server does them in slices between other requests, and replies after the last."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from torchfleet.base.errors import FleetError, ServerBusy, TableError, WireError
from torchfleet.base.monitor.notices import tell
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_BODY, STATE, Array, pack, unpack
from torchfleet.ps.server.arrays import column, only
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.state.work_queue import LongRequest
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.policy import MAX_SHARE, Shrink
from torchfleet.ps.tables.summary import Summary
from torchfleet.ps.tables.table import Table

MAX_KEPT = 16  # results of a command that are kept, so that a repeat of the request gets the same answer
MAX_QUEUED, MAX_QUEUED_OF_ONE = 64, 4  # unfinished requests over whole tables: of all clients, and of one client
MAX_TOP = 1000
MAX_WALKED = 1 << 24  # numbers in a reply to WALK: 64 MB
SLICE = 1 << 13

Work = Iterator[bool]  # yields after every slice, with the value that Server.work returns


class ClockBody(msgspec.Struct, forbid_unknown_fields=True):
    now: int
    token: int


class ShrinkBody(msgspec.Struct, forbid_unknown_fields=True):
    table: str  # "": all
    policy: Shrink  # a policy without criteria stands for the table's own
    token: int


class InspectBody(msgspec.Struct, forbid_unknown_fields=True):
    table: str
    top: int
    token: int


def in_slices(
    state: State, request: Request, token: int, make: Callable[[LongRequest], Work]
) -> Answer | FleetError | None:
    """Queue the work of a request. The reply comes when it is done; a repeat with the same token gets the same answer.

    Raises ServerBusy if the client, or all clients together, have too many such requests unfinished.
    """
    known = state.work.requests.get(token)
    if known is not None:
        known.request = request
        return known.result
    check_queue(state, request, token)
    known = state.work.requests[token] = LongRequest(request)
    known.work = guarded(state, known, make(known))
    state.work.slices.append(known.work)
    command = request.message.command  # INSPECT must not push out the result of a SHRINK, which would run again
    alike = [(key, long) for key, long in state.work.requests.items() if long.request.message.command == command]
    done = [key for key, long in alike if long.result is not None]
    for key in done[: max(0, len(alike) - MAX_KEPT)]:
        del state.work.requests[key]
    return None


def check_queue(state: State, request: Request, token: int) -> None:
    """Raise ServerBusy if `in_slices` would. Call it first in a command that changes something before `in_slices`."""
    if token in state.work.requests:
        return
    waiting = [long for long in state.work.requests.values() if long.result is None]
    own = sum(long.request.peer == request.peer for long in waiting)
    if own >= MAX_QUEUED_OF_ONE or len(waiting) >= MAX_QUEUED:
        raise ServerBusy(
            f"{own} requests over whole tables of this client wait or are worked on, at most {MAX_QUEUED_OF_ONE}, and "
            f"{len(waiting)} of all clients, at most {MAX_QUEUED}. Wait for their answers."
        )


def guarded(state: State, long: LongRequest, work: Work) -> Work:
    """`work`, with an exception in a slice turned into the answer to its request. The server goes on."""
    try:
        yield from work
    except Exception as error:
        if not isinstance(error, FleetError):
            tell(traceback.format_exc())
            error = FleetError(f"internal error of the server: {type(error).__name__}: {error}")
        long.result = error
        state.finish(long.request, error)


def set_clock(state: State, request: Request) -> Answer | FleetError | None:
    """Set the server's clock. The reply comes when the shrinks that are now due are done."""
    body = unpack(only(request), ClockBody, MAX_BODY)
    if not 0 <= body.now <= MAX_TIME:
        raise WireError(f"a time is a number of seconds since 1970, 0 to {MAX_TIME}; found {body.now}")
    due: list[int] = []
    check_queue(state, request, body.token)  # before the clock is set
    if body.token not in state.work.requests:  # a late copy of an old request must not turn the clock back
        state.clock.set(body.now)
        due = [table.spec.number for table in state.work.schedule.note(state.tables.values(), body.now)]
    return in_slices(state, request, body.token, lambda long: shrink_due(state, long, due))


def shrink_due(state: State, long: LongRequest, due: list[int]) -> Work:
    """Shrink the tables with the numbers `due`, each by its own policy."""
    long.due = due
    tables = [state.tables[number] for number in due]
    return shrink_in_slices(state, long, [(table, table.spec.shrink) for table in tables])


def shrink_tables(state: State, request: Request) -> Answer | FleetError | None:
    """Drop rows by a policy. The reply has the number of dropped rows per table."""
    body = unpack(only(request), ShrinkBody, MAX_BODY)
    chosen = chosen_tables(state, body)
    return in_slices(state, request, body.token, lambda long: shrink_in_slices(state, long, chosen))


def chosen_tables(state: State, body: ShrinkBody) -> list[tuple[Table, Shrink]]:
    """The tables to shrink, each with its policy. Raises TableError if there is no policy, or one does not fit."""
    tables = _sparse_tables(state, body.table)
    own = not body.policy.drops_any
    chosen = [(table, _asked(body.policy, table.spec.shrink)) for table in tables]
    chosen = [(table, policy) for table, policy in chosen if policy.drops_any]
    if own and not chosen:
        names = ", ".join(f"'{table.spec.name}'" for table in tables) or "no sparse table"
        raise TableError(
            f"no policy to shrink by: {names} has none of its own (SparseEmbedding(shrink=fleet.Shrink(...))), and "
            "none was given"
        )
    for table, policy in chosen:
        table.check_shrink(policy)
    return chosen


def _asked(policy: Shrink, own: Shrink) -> Shrink:
    """The policy of a request, or the table's own if that has no criteria. A `max_share` of the request takes
    precedence over the table's."""
    share = policy.max_share if policy.max_share != MAX_SHARE else own.max_share
    return msgspec.structs.replace(policy if policy.drops_any else own, max_share=share)


def shrink_in_slices(state: State, long: LongRequest | None, chosen: Sequence[tuple[Table, Shrink]]) -> Work:
    """Shrink the chosen tables in slices. `long` is the request to answer; None on the server's own schedule, which
    reports errors in the log only."""
    dropped: dict[str, int] = {} if long is None else long.dropped
    refused: TableError | None = None
    for table, policy in chosen:
        dropped.setdefault(table.spec.name, 0)
        try:
            for num in table.shrink(policy):
                dropped[table.spec.name] += num
                yield True
        except TableError as error:  # one table failed; the others are still shrunk
            refused = refused or error
    if long is not None:
        long.result = refused or [pack(dropped)]
        state.finish(long.request, long.result)
    elif refused is not None:
        tell(f"torchfleet server: {refused}")


def inspect(state: State, request: Request) -> Answer | FleetError | None:
    """Compute a table's histograms and top keys."""
    body = unpack(only(request), InspectBody, MAX_BODY)
    if not 0 <= body.top <= MAX_TOP:
        raise WireError(f"expected 0 to {MAX_TOP} top keys, found {body.top}")
    table = _sparse_tables(state, body.table)[0]
    return in_slices(state, request, body.token, lambda long: _inspect_in_slices(state, long, table, body.top))


def _inspect_in_slices(state: State, long: LongRequest, table: Table, top: int) -> Work:
    summary = Summary(table.spec, state.clock.now, top)
    for _ in table.summarize(summary, SLICE):
        yield True
    stats = table.stats()
    long.result = [pack({**summary.as_dict(), "candidates": stats.get("candidates", 0), "bytes": stats["bytes"]})]
    state.finish(long.request, long.result)


def walk(state: State, request: Request) -> Answer:
    """Return the next rows of a table from a cursor: the new cursor, keys and values. A client walks the table with
    repeated requests. With flag STATE the table's step follows the cursor, and the state of a row its values.
    """
    numbers = column(only(request), np.uint64)
    table, with_state = state.table(only(request).number), bool(request.message.flags & STATE)
    width = table.spec.num_words if with_state else table.spec.dim
    if len(numbers) != 2 or not 0 < int(numbers[1]) * width <= MAX_WALKED:
        raise WireError(
            f"expected where to go on and a number of rows, at most {MAX_WALKED:,} values; found {numbers.tolist()}"
        )
    keys, values, cursor = (table.walk_rows if with_state else table.walk)(int(numbers[0]), int(numbers[1]))
    number, head = table.spec.number, [cursor, table.step] if with_state else [cursor]
    return [Array(0, np.array(head, np.uint64)), Array(number, keys), Array(number, values)]


def _sparse_tables(state: State, name: str) -> list[Table]:
    """The sparse tables with rows for any id: the one of this name, or all if `name` is empty."""
    tables = [table for table in state.tables.values() if not table.spec.has_size]
    if not name:
        return tables
    found = [table for table in tables if table.spec.name == name]
    if not found:
        known = ", ".join(f"'{table.spec.name}'" for table in tables) or "none"
        raise TableError(f"no sparse table '{name}' with rows for any id; there are: {known}")
    return found
