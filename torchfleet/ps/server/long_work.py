"""Requests that go over whole tables: done in slices between other requests, answered when they are done."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from torchfleet.base.errors import FleetError, ServerBusy, TableError, WireError
from torchfleet.base.monitor.notices import tell
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_BODY, Array, pack, unpack
from torchfleet.ps.server.arrays import column, only
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.state.work_queue import LongRequest
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.policy import MAX_SHARE, Shrink
from torchfleet.ps.tables.summary import Summary
from torchfleet.ps.tables.table import Table

MAX_KEPT = 16  # outcomes that are remembered, for a repeat of the request
MAX_QUEUED, MAX_QUEUED_OF_ONE = 64, 4  # requests over whole tables that wait, or are worked on
MAX_TOP = 1000
MAX_WALKED = 1 << 24  # numbers in a reply to WALK: 64 MB
SLICE = 1 << 13

Work = Iterator[bool]  # yields after every slice; Server.work says what


class ClockBody(msgspec.Struct, forbid_unknown_fields=True):
    now: int
    token: int


class ShrinkBody(msgspec.Struct, forbid_unknown_fields=True):
    table: str  # "": all
    policy: Shrink  # the table's own if nothing is asked for
    token: int


class InspectBody(msgspec.Struct, forbid_unknown_fields=True):
    table: str
    top: int
    token: int


def in_slices(
    state: State, request: Request, token: int, make: Callable[[LongRequest], Work]
) -> Answer | FleetError | None:
    """Begin the work that this request asks for; a repeat of it gets the same answer."""
    known = state.work.requests.get(token)
    if known is not None:
        known.request = request
        return known.result
    _check_queue(state, request)
    known = state.work.requests[token] = LongRequest(request)
    known.work = guarded(state, known, make(known))
    state.work.slices.append(known.work)
    done = [key for key, long in state.work.requests.items() if long.result is not None]
    for key in done[: max(0, len(state.work.requests) - MAX_KEPT)]:
        del state.work.requests[key]
    return None


def _check_queue(state: State, request: Request) -> None:
    waiting = [long for long in state.work.requests.values() if long.result is None]
    own = sum(long.request.peer == request.peer for long in waiting)
    if own >= MAX_QUEUED_OF_ONE or len(waiting) >= MAX_QUEUED:
        raise ServerBusy(
            f"{own} requests over whole tables of this client wait or are worked on, at most {MAX_QUEUED_OF_ONE}, and "
            f"{len(waiting)} of all clients, at most {MAX_QUEUED}. Wait for their answers."
        )


def guarded(state: State, long: LongRequest, work: Work) -> Work:
    """Whatever goes wrong in a slice is the answer to its request, and not the end of the server."""
    try:
        yield from work
    except Exception as error:
        if not isinstance(error, FleetError):
            tell(traceback.format_exc())
            error = FleetError(f"internal error of the server: {type(error).__name__}: {error}")
        long.result = error
        state.finish(long.request, error)


def set_clock(state: State, request: Request) -> Answer | FleetError | None:
    """It is `now`. The reply comes when the shrinks that this makes due are done."""
    body = unpack(only(request), ClockBody, MAX_BODY)
    if not 0 <= body.now <= MAX_TIME:
        raise WireError(f"a time is a number of seconds since 1970, 0 to {MAX_TIME}; found {body.now}")
    due: list[int] = []
    if body.token not in state.work.requests:  # a late copy of an old request turns no clock back
        state.clock.set(body.now)
        due = [table.spec.number for table in state.work.schedule.note(state.tables.values(), body.now)]
    return in_slices(state, request, body.token, lambda long: shrink_due(state, long, due))


def shrink_due(state: State, long: LongRequest, due: list[int]) -> Work:
    """The tables with these numbers, each by its own policy."""
    long.due = due
    tables = [state.tables[number] for number in due]
    return shrink_in_slices(state, long, [(table, table.spec.shrink) for table in tables])


def shrink_tables(state: State, request: Request) -> Answer | FleetError | None:
    """Drop rows by a policy. The reply: how many of which table."""
    body = unpack(only(request), ShrinkBody, MAX_BODY)
    chosen = chosen_tables(state, body)
    return in_slices(state, request, body.token, lambda long: shrink_in_slices(state, long, chosen))


def chosen_tables(state: State, body: ShrinkBody) -> list[tuple[Table, Shrink]]:
    """Which tables are to be shrunk, and by what. Raises TableError."""
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
    """The policy of a request, or the table's own if it asks for nothing; with the share of rows that either allows."""
    share = policy.max_share if policy.max_share != MAX_SHARE else own.max_share
    return msgspec.structs.replace(policy if policy.drops_any else own, max_share=share)


def shrink_in_slices(state: State, long: LongRequest | None, chosen: Sequence[tuple[Table, Shrink]]) -> Work:
    """Without a request (on the server's own schedule) nobody is told."""
    dropped: dict[str, int] = {} if long is None else long.dropped
    refused: TableError | None = None
    for table, policy in chosen:
        dropped.setdefault(table.spec.name, 0)
        try:
            for num in table.shrink(policy):
                dropped[table.spec.name] += num
                yield True
        except TableError as error:  # of one table; the others are shrunk all the same
            refused = refused or error
    if long is not None:
        long.result = refused or [pack(dropped)]
        state.finish(long.request, long.result)
    elif refused is not None:
        tell(f"torchfleet server: {refused}")


def inspect(state: State, request: Request) -> Answer | FleetError | None:
    """A table's histograms and top keys."""
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
    """Some rows of a table, whichever come next: where to go on, keys and values. A client asks for them bit by bit."""
    numbers = column(only(request), np.uint64)
    table = state.table(only(request).number)
    if len(numbers) != 2 or not 0 < int(numbers[1]) * table.spec.dim <= MAX_WALKED:
        raise WireError(
            f"expected where to go on and a number of rows, at most {MAX_WALKED:,} values; found {numbers.tolist()}"
        )
    keys, values, cursor = table.walk(int(numbers[0]), int(numbers[1]))
    number = table.spec.number
    return [Array(0, np.array([cursor], np.uint64)), Array(number, keys), Array(number, values)]


def _sparse_tables(state: State, name: str) -> list[Table]:
    """The table of this name, or all, of those with rows for any id."""
    tables = [table for table in state.tables.values() if not table.spec.has_size]
    if not name:
        return tables
    found = [table for table in tables if table.spec.name == name]
    if not found:
        known = ", ".join(f"'{table.spec.name}'" for table in tables) or "none"
        raise TableError(f"no sparse table '{name}' with rows for any id; there are: {known}")
    return found
