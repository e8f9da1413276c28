"""The command by which a process follows the tables of a server: what changed since its last request."""

from __future__ import annotations

import msgspec

from torchfleet.base.errors import TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_ARRAYS, MAX_BODY, Array, pack, unpack
from torchfleet.ps.server.arrays import only
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.state.subscriptions import Subscription

MAX_NUMBERS = 1 << 19  # in the rows of a reply: 2 MB, one to three milliseconds


class SubscribeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`subscriber` is a random number of the process; `received` the number of its last reply, 0 to begin."""

    subscriber: int
    received: int


class ChangedBody(msgspec.Struct):
    """The head of a reply. Arrays follow: per table number in `rows`, keys, their values, and keys that have no row any
    more; per table number in `blocks`, the whole block."""

    number: int
    is_known: bool  # False: changes are kept from now on, and the server does not know earlier ones
    rest: int  # keys that the reply had no room for
    changed_at: float  # seconds since 1970 of the last change
    rows: list[int] = []
    blocks: list[int] = []


def subscribe(state: State, request: Request) -> Answer:
    """Return the rows that changed since this subscriber's last request, with their current values. If `rest` is 0, the
    subscriber has the tables as they are now once it has applied this reply and all earlier ones.
    """
    body = unpack(only(request), SubscribeBody, MAX_BODY)
    for table in state.tables.values():
        if not table.tells_changes:
            raise TableError(f"table '{table.spec.name}' is of kind '{table.spec.kind}', whose changes are not told")
    found, is_known = state.subscriptions.ask(body.subscriber, body.received, state.now())
    state.watch_tables()
    told = ChangedBody(found.number, is_known, 0, found.changed_at)
    arrays = [*_rows(state, found, told), *_blocks(state, found, told)] if is_known else []
    return [pack(told), *arrays]


def _rows(state: State, found: Subscription, told: ChangedBody) -> list[Array]:
    arrays: list[Array] = []
    num_left = MAX_NUMBERS
    for number, pending in found.rows.items():
        table = state.table(number)
        if num_left > 0 and pending.num and len(arrays) < MAX_ARRAYS // 2:
            keys, values, gone = pending.take(table, max(1, num_left // table.spec.dim))
            num_left -= (len(keys) + len(gone)) * table.spec.dim
            arrays += [Array(number, each) for each in (keys, values, gone)]
            told.rows.append(number)
        told.rest += pending.num
    return arrays


def _blocks(state: State, found: Subscription, told: ChangedBody) -> list[Array]:
    """The changed dense blocks, only in the reply with the last rows: rows and blocks are then of the same moment."""
    if told.rest:
        return []
    told.blocks = sorted(found.blocks)
    found.sent_blocks, found.blocks = found.blocks, set()
    return [Array(number, state.table(number).whole()) for number in told.blocks]  # type: ignore[arg-type]
