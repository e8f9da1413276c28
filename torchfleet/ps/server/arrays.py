"""Checks of a request's arrays: their number, dtype and shape must fit the command."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import WireError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import BOUNDED, GATHERED, Array
from torchfleet.ps.server.grouped_tables import MAX_SAMPLES, AnySection
from torchfleet.ps.server.sections import Section
from torchfleet.ps.server.state.state import State
from torchfleet.ps.tables.table import Table

MAX_WORKERS = 1 << 16
MAX_STEP = 1 << 53  # updates of a table: float64 holds such numbers exactly


def only(request: Request) -> Array:
    """The single array of a request."""
    if len(request.message.arrays) != 1:
        raise WireError(f"expected one array, found {len(request.message.arrays)}")
    return request.message.arrays[0]


def column(array: Array, dtype: npt.DTypeLike) -> npt.NDArray[np.uint64]:
    """An array of one column, flat."""
    if array.data.dtype != dtype or array.data.shape[1] != 1:
        raise WireError(f"expected one column of {np.dtype(dtype)}, found {array.data.shape} of {array.data.dtype}")
    return array.data.reshape(-1)


def floats(array: Array) -> npt.NDArray[np.float32]:
    if array.data.dtype != np.float32:
        raise WireError(f"expected float32 values, found {array.data.dtype}")
    return array.data


def gradients(table: Table, array: Array, num_keys: int) -> npt.NDArray[np.float32]:
    """The gradients of a push: float32, or the table's narrower rows (rows/wire_rows.py)."""
    narrow = None if array.data.dtype == np.float32 else table.pushed_rows
    return floats(array) if narrow is None else narrow.decode(array.data, num_keys, f"table '{table.spec.name}'")


def check_worker(state: State, request: Request) -> None:
    num_workers = state.num_workers or MAX_WORKERS
    if request.message.worker >= num_workers:
        raise WireError(f"there are {num_workers} workers, numbered from 0; found number {request.message.worker}")


def _expect_distinct(arrays: Sequence[Array]) -> None:
    if len(arrays) > 1 and len({array.number for array in arrays}) < len(arrays):
        raise WireError("a table appears twice in one message: put its keys together")


def key_sections(state: State, arrays: Sequence[Array]) -> list[tuple[Table, npt.NDArray[np.uint64]]]:
    """(table, keys) of each array. Raises WireError if a table appears twice."""
    _expect_distinct(arrays)
    return [(state.table(array.number), column(array, np.uint64)) for array in arrays]


def pairs(
    state: State, arrays: Sequence[Array], are_gradients: bool = False
) -> list[tuple[Table, npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
    """(table, keys, values or gradients) of each pair of arrays. Raises WireError if a table appears twice."""
    if len(arrays) % 2:
        raise WireError(f"expected pairs of keys and values, found {len(arrays)} arrays")
    _expect_distinct(arrays[::2])
    found = []
    for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
        if keys.number != values.number:
            raise WireError(f"keys for table {keys.number} are followed by values for table {values.number}")
        table, own = state.table(keys.number), column(keys, np.uint64)
        found.append((table, own, gradients(table, values, len(own)) if are_gradients else floats(values)))
    return found


def given_steps(last: Sequence[Array], num: int) -> list[int]:
    """The steps of `num` tables, from the last array of a request. Raises WireError for a wrong number or value."""
    steps = column(last[0], np.uint64).tolist() if last else []
    if len(steps) != num or any(step > MAX_STEP for step in steps):
        raise WireError(f"expected the steps of {num} tables, each at most {MAX_STEP}, found {steps[:8]}")
    return steps


def checked_sections(
    state: State, request: Request, grouped: Sequence[AnySection] | None = None
) -> Sequence[AnySection]:
    """The sections of a push, after their checks. `grouped`: the result of push_grouped, if that was called."""
    sections: Sequence[AnySection] = push_sections(state, request) if grouped is None else grouped
    for section in sections:
        section.check()
    return sections


def push_sections(state: State, request: Request) -> list[Section]:
    """The sections of a push.

    The first array has one row per section. Its columns are the learning rate (NaN: the table's own), and optionally
    the table's step when the values were pulled, and the number of samples behind the gradients. Pairs of keys and
    gradients follow.
    """
    if not request.message.arrays:
        raise WireError("expected learning rates, found no array")
    rates = request.message.arrays[0].data
    if rates.dtype != np.float64 or rates.shape[1] not in (1, 2, 3):
        raise WireError(f"expected learning rates, 1 to 3 columns of float64, found {rates.shape} of {rates.dtype}")
    has_settings = bool(request.message.flags & (GATHERED | BOUNDED))  # the last array then holds the settings
    if has_settings and len(request.message.arrays) < 2:
        raise WireError("expected the settings of this push behind the gradients, found no array")
    pushed = pairs(state, request.message.arrays[1 : -1 if has_settings else None], are_gradients=True)
    if len(rates) != len(pushed):
        raise WireError(f"{len(rates)} learning rates for {len(pushed)} sections")
    sections = []
    for (rate, *more), (table, keys, grads) in zip(rates.tolist(), pushed, strict=True):
        pulled_at = more[0] if more and math.isfinite(more[0]) else None
        num_samples = more[1] if len(more) > 1 else None
        if num_samples is not None and not 0 <= num_samples <= MAX_SAMPLES:
            raise WireError(f"a number of samples is 0 to {MAX_SAMPLES:g}, found {num_samples}")
        sections.append(Section(table, keys, grads, None if math.isnan(rate) else rate, pulled_at, num_samples))
    return sections
