"""Rows that count: each step takes 1 from rows of its own, and the tables say which steps are in them, and how often.

What a worker was told to be applied must be there once. Steps of a killed worker that it had begun, and not heard of,
may be there or not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.chaos.progress import Board

KEYS_PER_STEP = 4  # spread over the servers
_TOLERANCE = 1e-3  # geo sends differences in shares, whose sum is rounded
_CHUNK = 1 << 16

Ids = npt.NDArray[np.int64]
Read = Callable[[Ids], npt.NDArray[np.float32]]


def keys_of(worker: int, first: int, last: int) -> Ids:
    """Of the steps from `first` to before `last`."""
    return (1 << 50) + (worker << 40) + np.arange(first * KEYS_PER_STEP, last * KEYS_PER_STEP, dtype=np.int64)


def audit(board: Board, read: Read, one: float, is_partial: bool) -> dict[str, int]:
    """Which steps are missing or there twice. `one`: what a step takes from its rows; `is_partial`: a killed worker
    may have sent a part of what it had (geo)."""
    lost = doubled = unknown = 0
    for progress in board.all():
        before = max((p.begun for p in board.of(progress.worker) if p.restart < progress.restart), default=0)
        if progress.begun < before:  # it was killed before it began
            continue
        sure = progress.acknowledged if progress.is_done or not is_partial else before
        lost += _count(read, keys_of(progress.worker, before, sure), lambda taken: taken < one - _TOLERANCE)
        doubled += _count(
            read, keys_of(progress.worker, before, progress.begun), lambda taken: taken > one + _TOLERANCE
        )
        unknown += progress.begun - sure
    return {"lost": lost, "doubled": doubled, "unknown_steps": unknown, "steps": sum(board.num_steps())}


def _count(read: Read, keys: Ids, is_wrong: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.bool_]]) -> int:
    """Of how many keys."""
    chunks = (keys[start : start + _CHUNK] for start in range(0, len(keys), _CHUNK))
    return sum(int(is_wrong(-read(chunk)).sum()) for chunk in chunks)
