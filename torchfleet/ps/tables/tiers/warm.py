"""Uses the kernels of tables on two tiers once, without a file."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels import pages
from torchfleet.ps.kernels.disk_reads import EVENT_WORDS, REQUEST_WORDS, read_blocks
from torchfleet.ps.kernels.key_search import keep_found
from torchfleet.ps.kernels.statistics import oldest
from torchfleet.ps.tables.tiers.directory import Directory
from torchfleet.ps.tables.tiers.pages import Layout


def warm_up_tiers() -> None:
    """Compile the kernels, or load them from the cache."""
    keys, places = np.arange(100, dtype=np.uint64), np.arange(1000, 1100)
    directory = Directory(100_000, 1000)
    directory.insert(keys, places)
    many = np.arange(1000, 61_000, dtype=np.uint64)
    directory.insert(many, many.astype(np.int64) + 1000)  # its sub-maps grow
    directory.find_cold(keys, np.zeros(100, np.int64))
    directory.places_from(0, 100)
    directory.move(keys, places, np.arange(100))
    directory.remove(keys, np.arange(100))
    layout = Layout(4)
    block = np.zeros(layout.block_bytes // 4, np.uint32)
    layout.fill(block, 0, np.ones((100, layout.record_words), np.uint32))
    layout.seal(block, 1)
    layout.check(block, 1 + np.arange(layout.pages_per_block), "")
    three = np.arange(3)
    layout.take(block, np.zeros(3, np.int64), three, np.empty((3, layout.record_words), np.uint32))
    pages.find_read(np.zeros(3, np.int32), three, three, three, three, np.empty(3, np.int64))
    none, queue = np.empty(0, np.int64), np.zeros((1, REQUEST_WORDS), np.uint64)
    events, pages_PD = np.zeros((1, EVENT_WORDS), np.uint64), block.view(np.uint64).reshape(1, -1)
    read_blocks(0, 0, 0, 0, none, 0, 4096, queue, queue[0], events, pages_PD, none, none)  # reads nothing
    keep_found(np.zeros((1, 4), np.uint32), np.zeros(8, np.uint32), np.uint32(1), keys[:1], np.zeros(1, np.int64), 4)
    used, slots = np.zeros(8, np.uint8), np.arange(3)
    pages.note_used(used, 0, 64)
    pages.note_unused(used, slots)
    layout.take_used(block, slots[:1], slots[2:], used, 0, slots[:1], 1, 0)
    oldest(np.zeros(8, np.uint32), 1, 0, 0, 8, np.uint32(0), 8, np.empty(8, np.int64))
