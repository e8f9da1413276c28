"""The rows of a table, and what it knows of keys without one, as slices of a save, and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchfleet.ps.tables.policies.admission import Admission
from torchfleet.ps.tables.rowstore import RowStore
from torchfleet.ps.tables.settings.policy import BLOCK_BYTES
from torchfleet.ps.tables.table import SavedSlice, SaveMode

SKETCH_BLOCKS = (1 << 25) // BLOCK_BYTES  # in one slice: as many as a part file holds


def save_slices(table: RowStore, mode: SaveMode, num_rows: int) -> Iterator[SavedSlice]:
    """As Table.save_slices; a delta begins with the keys that lost their rows."""
    is_delta, with_state = mode == "delta", mode != "inference"
    width = table.num_words if with_state else table.spec.dim
    if is_delta and table.tracking is not None:
        yield SavedSlice("gone", {"keys": table.absent(table.tracking.gone)})
    is_empty = True
    for keys, rows, columns in table.chunks(num_rows, mode if mode in ("full", "delta") else None):
        kept = {name: column for name, column in columns.items() if name != "delta" or mode == "copy"}
        if not with_state:
            kept = {}
        yield SavedSlice("rows", {"keys": keys, "rows": rows[:, :width], **kept})
        is_empty = False
    if is_empty:
        yield SavedSlice("rows", {"keys": np.empty(0, np.uint64), "rows": np.empty((0, width), np.float32)})
    if table.admission is not None and with_state:
        yield from _save_admission(table.admission, is_delta, num_rows)


def _save_admission(admission: Admission, is_delta: bool, num_rows: int) -> Iterator[SavedSlice]:
    """What is known of keys that have no row."""
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


def load_slice(table: RowStore, saved: SavedSlice) -> None:
    """As RowTable.load_slice. Of keys without a row only what this table's entry counts is taken in."""
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
        table.load(keys, columns.pop("rows"), columns)
        if candidates is not None and candidates.index.num_keys:
            candidates.erase(keys)
    elif candidates is not None and saved.kind == "candidates_gone":
        candidates.erase(keys)
    elif candidates is not None:
        candidates.load(keys, columns, table.clock.now)
