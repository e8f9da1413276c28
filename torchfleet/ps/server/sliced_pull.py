"""Pulls of very many keys. The server does them in slices, so that other requests are served in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import FleetError, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import FORESEEN, NO_CREATE, STATE, VERSIONS, Array
from torchfleet.ps.server.state.state import State
from torchfleet.ps.tables.rows.row_statistics import is_counted
from torchfleet.ps.tables.table import Table

SLICE = 1 << 14  # keys: two or three milliseconds
WHOLE = 1 << 17  # most keys of a pull that is not sliced
NEW_SLICE, NEW_WHOLE = 1 << 12, 1 << 15  # SLICE and WHOLE for keys that are likely to be new
MAX_BYTES = 1 << 27  # of the reply to a long pull; clients split larger pulls

PulledKeys = tuple[Table, npt.NDArray[np.uint64]]


def pulls_long(state: State, request: Request, sections: Sequence[PulledKeys], create: bool) -> bool:
    """Whether to slice a pull: it must be long enough, and slicing must not change its meaning.

    A table that counts appearances counts a key once per pull, so a pull from such a table is not sliced.
    """
    num_keys = 0
    for table, keys in sections:
        if not table.spec.is_dense:
            num_keys += len(keys)
    if num_keys <= NEW_WHOLE:
        return False
    is_growing = create and state.budgets.is_growing(request.peer, request.arrived)
    return num_keys > (NEW_WHOLE if is_growing else WHOLE) and not (
        create and any(is_counted(table.spec) for table, _ in sections)
    )


def pulled(table: Table, flags: int) -> Callable[[npt.NDArray[np.uint64], bool, int | None], npt.NDArray[Any]]:
    """The method that a pull with these flags calls: rows with their state, or values as the reply encodes them."""
    if table.spec.is_dense:
        return table.pull_encoded
    if flags & FORESEEN and (flags & NO_CREATE or not is_counted(table.spec)):
        return table.pull_foreseen
    return table.pull_rows if flags & STATE else table.pull_encoded


def steps_of(sections: Sequence[PulledKeys]) -> Array:
    """The step of each table, which is its number of updates so far (flag VERSIONS)."""
    return Array(0, np.array([[table.step] for table, _ in sections], np.uint64).reshape(-1, 1))


def begin_long_pull(
    state: State, request: Request, sections: Sequence[PulledKeys], create: bool, worker: int | None
) -> None:
    """Begin a sliced pull. The reply comes after the last slice; the client's budget is charged until then.

    Raises TableError if the reply would exceed MAX_BYTES, ServerBusy if the client's budget has no room.
    """
    width = "num_words" if request.message.flags & STATE else "dim"
    num_bytes = sum(4 * len(keys) * getattr(table.spec, width) for table, keys in sections)
    if num_bytes > MAX_BYTES:
        raise TableError(
            f"the reply to a pull has at most {MAX_BYTES:,} bytes; found {num_bytes:,}. Pull fewer keys at a time."
        )
    state.budgets.hold(request, num_bytes)
    state.work.pulls.begin(request.peer, _slices(state, request, sections, create, worker))


def _slices(
    state: State, request: Request, sections: Sequence[PulledKeys], create: bool, worker: int | None
) -> Iterator[bool]:
    """Pull slice by slice, then answer. The steps in the reply are those at the start, so no value is older."""
    reply = []
    steps = steps_of(sections)
    try:
        for table, keys in sections:
            if table.spec.is_dense:
                reply.append(Array(table.spec.number, table.pull(keys, create, worker)))
                continue
            read = pulled(table, request.message.flags)
            none = read(keys[:0], False, None)  # for its type and width
            out = np.empty((len(keys), none.shape[1]), none.dtype)
            reply.append(Array(table.spec.number, out))
            start, size = 0, NEW_SLICE
            while start < len(keys):
                some = keys[start : start + size]
                table.check_pull(some, create)  # requests between the slices may have filled the table
                before = table.num_rows
                out[start : start + size] = read(some, create, worker)
                num_new = table.num_rows - before
                state.budgets.note_pull(request.peer, len(some), num_new, state.now())
                start, size = start + size, NEW_SLICE if 2 * num_new > len(some) else SLICE
                yield True
    except FleetError as error:
        state.finish(request, type(error)(f"{error} Rows of the keys before have been created."))
        return
    state.finish(request, [*reply, steps] if request.message.flags & VERSIONS else reply)
