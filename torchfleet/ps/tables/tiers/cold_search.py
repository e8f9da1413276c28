"""Rows on disk by key: the directory says where the row of a key may be, and the record there has the key."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.directory import Directory, Places
from torchfleet.ps.tables.tiers.pages import Words, keys_of


def look_up(directory: Directory, cold: ColdRows, keys: Keys) -> tuple[Places, Words]:
    """(places of the keys whose rows are on disk, -1 for others; their records, in the order of the keys)."""
    out, found = np.full(len(keys), -1, np.int64), []
    skips, pending = np.zeros(len(keys), np.int64), np.arange(len(keys))
    while len(pending):
        places = directory.find_cold(keys[pending], skips[pending])
        pending, places = pending[places >= 0], places[places >= 0]
        if not len(pending):
            break
        records = cold.read(places - directory.first_cold)
        same = keys_of(records) == keys[pending]
        if len(pending) == len(keys) and same.all():  # the usual case
            return places, records
        out[pending[same]] = places[same]
        found.append((pending[same], records[same]))
        skips[pending[~same]] += 1  # another key with the same tag
        pending = pending[~same]
    order = np.argsort(np.concatenate([some for some, _ in found] or [np.empty(0, np.int64)]), kind="stable")
    empty = np.empty((0, cold.layout.record_words), np.uint32)
    return out, np.concatenate([some for _, some in found] or [empty])[order]
