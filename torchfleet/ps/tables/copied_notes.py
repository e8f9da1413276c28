"""What a table knows beside its rows, for a server that takes the place of this one."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchfleet.ps.tables.dense_table import DenseTable
from torchfleet.ps.tables.policies.admission import Candidates
from torchfleet.ps.tables.rows.tracking import PackedTracking, Tracking
from torchfleet.ps.tables.rowstore import RowStore
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.table import Table

SLICE = 1 << 16  # rows


def export_notes(table: Table) -> dict[str, Any]:
    """As plain values. Kinds from outside the package have their count of updates and ages."""
    notes: dict[str, Any] = {"step": table.step, "staleness": table.staleness.counts()}
    if isinstance(table, DenseTable):
        notes |= {"is_set": table.is_set, "loaded": table.loaded}
    if isinstance(table, RowStore):
        notes |= {"num_evicted": table.num_evicted, "tracking": _gone(table.tracking), "candidates": None}
        if table.admission is not None and table.admission.candidates is not None:
            notes["candidates"] = _gone(table.admission.candidates.tracking)
    if isinstance(table, SparseTable):
        notes |= {"num_loaded": table.num_loaded, "waiting": table.export_waiting()}
    return notes


def restore_notes(table: Table, notes: dict[str, Any]) -> None:
    """What `export_notes` gave, into a table that has no rows yet."""
    table.step = notes["step"]
    table.staleness.restore(notes["staleness"])
    if isinstance(table, DenseTable):
        table.is_set, table.loaded = notes["is_set"], [(start, stop) for start, stop in notes["loaded"]]
    if isinstance(table, RowStore):
        table.num_evicted = notes["num_evicted"]
    if isinstance(table, SparseTable):
        table.num_loaded = notes["num_loaded"]
        table.restore_waiting(notes["waiting"])


def restore_tracking(table: Table, notes: dict[str, Any]) -> None:
    """All rows are here. Which of them a delta must write is not known: it writes all, once."""
    if not isinstance(table, RowStore) or notes["tracking"] is None:
        return
    table.begin_save(is_committed=True)
    _note_all(table, notes)
    table.begin_save(is_committed=False)  # for a save that is under way
    _note_all(table, notes)  # and for the one after it


def _note_all(table: RowStore, notes: dict[str, Any]) -> None:
    assert table.tracking is not None
    for keys in notes["tracking"]:
        table.tracking.note_gone(np.frombuffer(keys, np.uint64))
    for rows in table.slices(SLICE):
        table.tracking.mark(table.index.alive(rows)[1])
    candidates = table.admission.candidates if table.admission is not None else None
    if candidates is not None and candidates.tracking is not None:
        _note_candidates(candidates, candidates.tracking, notes["candidates"] or ())


def _note_candidates(candidates: Candidates, tracking: Tracking, gone: tuple[bytes, ...]) -> None:
    for keys in gone:
        tracking.note_gone(np.frombuffer(keys, np.uint64))
    tracking.mark(candidates.index.alive(np.arange(candidates.index.num_row_numbers))[1])


def _gone(tracking: Tracking | PackedTracking | None) -> list[bytes] | None:
    """Keys that lost their rows: those that the save under way must write, and those since."""
    return None if tracking is None else [keys.tobytes() for keys in (tracking.gone, tracking.gone_since)]
