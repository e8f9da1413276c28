"""Saving and loading a table's rows and the statistics of its candidates as slices; and the change tracking of a copy
of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torchfleet.ps.tables.keyed_table import KeyedTable
from torchfleet.ps.tables.policies.admission import Admission, Candidates
from torchfleet.ps.tables.rows.tracking import AnyTracking, Tracking
from torchfleet.ps.tables.settings.policy import BLOCK_BYTES
from torchfleet.ps.tables.table import SavedSlice, SaveMode

SKETCH_BLOCKS = (1 << 25) // BLOCK_BYTES  # blocks in one slice: as many as a part file holds


def save_slices(table: KeyedTable, mode: SaveMode, num_rows: int) -> Iterator[SavedSlice]:
    """As Table.save_slices; a delta begins with the keys that lost their rows."""
    is_delta, with_state = mode == "delta", mode != "inference"
    if is_delta and table.tracking is not None:
        yield SavedSlice("gone", {"keys": table.absent(table.tracking.gone)})
    is_empty = True
    for keys, rows, columns in table.stored_chunks(num_rows, mode if mode in ("full", "delta") else None):
        kept = {name: column for name, column in columns.items() if name != "delta" or mode == "copy"}
        if not with_state:
            kept = {}
        yield SavedSlice("rows", {"keys": keys, **table.form.arrays(rows, with_state), **kept})
        is_empty = False
    if is_empty:
        none = np.empty((0, table.spec.stored_words), np.float32)
        yield SavedSlice("rows", {"keys": np.empty(0, np.uint64), **table.form.arrays(none, with_state)})
    if table.admission is not None and with_state:
        yield from _save_admission(table.admission, is_delta, num_rows)


def _save_admission(admission: Admission, is_delta: bool, num_rows: int) -> Iterator[SavedSlice]:
    """Slices with the statistics of keys that have no row."""
    if admission.candidates is not None:
        if is_delta:
            yield SavedSlice("candidates_gone", {"keys": admission.candidates.gone()})
        for keys, columns in admission.candidates.chunks(num_rows, is_delta):
            yield SavedSlice("candidates", {"keys": keys, **columns})
    sketch = admission.sketch
    if sketch is not None:
        for start in range(sketch.first, sketch.first + sketch.num, SKETCH_BLOCKS):
            stop = min(start + SKETCH_BLOCKS, sketch.first + sketch.num)
            yield SavedSlice("sketch", {"blocks": sketch.blocks(start, stop)}, start)


def load_slice(table: KeyedTable, saved: SavedSlice) -> None:
    """As RowTable.load_slice. Of keys without a row, loads only what this table's entry counts."""
    if saved.kind == "sketch":
        if table.admission is not None and table.admission.sketch is not None:
            table.admission.sketch.load(saved.start, saved.arrays["blocks"])
        return
    columns = dict(saved.arrays)
    keys = columns.pop("keys")
    candidates = table.admission.candidates if table.admission is not None else None
    if saved.kind == "gone":
        table.erase(keys)
    elif saved.kind == "rows":
        if "rows" in columns:
            table.load(keys, columns.pop("rows"), columns)
        else:
            table.load_stored(keys, table.form.from_arrays(columns), columns)
        if candidates is not None and candidates.index.num_keys:
            candidates.erase(keys)
    elif candidates is not None and saved.kind == "candidates_gone":
        candidates.erase(keys)
    elif candidates is not None:
        candidates.load(keys, columns, table.clock.now)


def export_changes(table: KeyedTable) -> dict[str, Any]:
    """The keys that lost their rows since the last save, as plain values."""
    candidates = table.admission.candidates if table.admission is not None else None
    return {"tracking": _gone(table.tracking), "candidates": _gone(candidates.tracking) if candidates else None}


def note_all_changed(table: KeyedTable, notes: Mapping[str, Any]) -> None:
    """Mark all rows as changed, after a copy. `notes` is the `export_changes` of the source table. A copy does not know
    which rows a delta must write, so the next delta writes all of them once.
    """
    if notes["tracking"] is None:
        return
    table.begin_save(is_committed=True)
    _note_all(table, notes)
    table.begin_save(is_committed=False)  # for a save that is in progress
    _note_all(table, notes)  # and for the next one


def _note_all(table: KeyedTable, notes: Mapping[str, Any]) -> None:
    assert table.tracking is not None
    for keys in notes["tracking"]:
        table.tracking.note_gone(np.frombuffer(keys, np.uint64))
    table.mark_all()
    candidates = table.admission.candidates if table.admission is not None else None
    if candidates is not None and candidates.tracking is not None:
        _note_candidates(candidates, candidates.tracking, notes["candidates"] or ())


def _note_candidates(candidates: Candidates, tracking: Tracking, gone: tuple[bytes, ...]) -> None:
    for keys in gone:
        tracking.note_gone(np.frombuffer(keys, np.uint64))
    tracking.mark(candidates.index.alive(np.arange(candidates.index.num_row_numbers))[1])


def _gone(tracking: AnyTracking | None) -> list[bytes] | None:
    """Keys that lost their rows: those that the current save must write, and those since it began."""
    return None if tracking is None else [keys.tobytes() for keys in (tracking.gone, tracking.gone_since)]
