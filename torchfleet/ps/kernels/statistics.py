"""Statistics behind the rows of a store: one 32-bit word per column, integers or float32.

`store` is the flat float32 store of rows of `width` words, `words` the same memory as uint32. `columns` gives the word
of each column in a row, in the order of COLUMNS; -1: the table does not keep it.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.jit import inlined, kernel

COLUMNS = ("count", "seen", "born", "tick", "show", "click", "delta", "slot")
COUNT, SEEN, BORN, TICK, SHOW, CLICK, DELTA, SLOT = range(8)
NEVER = np.uint32(0xFFFFFFFF)  # the tick of a row that is not in use
_DAY = np.uint32(86_400)
_ONE = np.uint32(1)


@inlined
def _decay(
    store: np.ndarray, words: np.ndarray, at: int, columns: np.ndarray, now: np.uint32, powers: np.ndarray
) -> None:
    """Decay shows and clicks to the day of `now`."""
    if columns[SHOW] < 0 or columns[SEEN] < 0:
        return
    then = words[at + columns[SEEN]] // _DAY
    today = now // _DAY
    if today > then:
        share = powers[min(np.int64(today - then), len(powers) - 1)]
        store[at + columns[SHOW]] *= share
        store[at + columns[CLICK]] *= share


@kernel
def appear(
    store: np.ndarray,
    words: np.ndarray,
    width: int,
    columns: np.ndarray,
    rows_N: np.ndarray,
    now: np.uint32,
    tick: np.uint32,
    powers: np.ndarray,
) -> None:
    """Record that rows were looked up for training; negative row numbers are ignored. Time never goes back."""
    for i in range(len(rows_N)):
        if rows_N[i] < 0:
            continue
        at = rows_N[i] * width
        _decay(store, words, at, columns, now, powers)
        if columns[SEEN] >= 0:
            words[at + columns[SEEN]] = max(words[at + columns[SEEN]], now)
        if columns[TICK] >= 0:
            words[at + columns[TICK]] = tick
        if columns[COUNT] >= 0:
            words[at + columns[COUNT]] += _ONE


@kernel
def oldest(
    words: np.ndarray, width: int, place: int, start: int, stop: int, cut: np.uint32, most: int, rows_M: np.ndarray
) -> tuple[int, int]:
    """Rows in start..stop whose word at `place` is at most `cut`; at most `most` of them.

    Returns (how many, the row after the last one examined).
    """
    num, row = 0, start
    while row < stop and num < most:
        if words[row * width + place] <= cut:
            rows_M[num] = row
            num += 1
        row += 1
    return num, row


@kernel
def begin(
    store: np.ndarray,
    words: np.ndarray,
    width: int,
    columns: np.ndarray,
    rows_N: np.ndarray,
    now: np.uint32,
    tick: np.uint32,
) -> None:
    """Initialize new rows, which have not appeared yet: `appear` comes next."""
    for i in range(len(rows_N)):
        at = rows_N[i] * width
        for c in (COUNT, SLOT):
            if columns[c] >= 0:
                words[at + columns[c]] = np.uint32(0)
        for c in (SEEN, BORN):
            if columns[c] >= 0:
                words[at + columns[c]] = now
        if columns[TICK] >= 0:
            words[at + columns[TICK]] = tick
        for c in (SHOW, CLICK, DELTA):
            if columns[c] >= 0:
                store[at + columns[c]] = np.float32(0)


@kernel
def add_shows(
    store: np.ndarray,
    words: np.ndarray,
    width: int,
    columns: np.ndarray,
    rows_N: np.ndarray,
    pushed_N3: np.ndarray,
    nonclick_weight: np.float32,
    click_weight: np.float32,
) -> None:
    """pushed_N3: show, click and slot (0: not known), for each row that exists."""
    for i in range(len(rows_N)):
        if rows_N[i] < 0:
            continue
        at = rows_N[i] * width
        show, click = pushed_N3[i, 0], pushed_N3[i, 1]
        if columns[SHOW] >= 0:
            store[at + columns[SHOW]] += show
            store[at + columns[CLICK]] += click
        if columns[DELTA] >= 0:
            store[at + columns[DELTA]] += nonclick_weight * (show - click) + click_weight * click
        if columns[SLOT] >= 0 and pushed_N3[i, 2] > 0:
            words[at + columns[SLOT]] = np.uint32(pushed_N3[i, 2])
