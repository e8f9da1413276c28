"""Counts how often keys appeared within a sliding window of time, in fixed memory: one shard of the counters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import sketch
from torchfleet.ps.kernels.sketch import NUM_PANES, NUM_WORDS
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.settings.policy import BLOCK_BYTES

_LAST_PANE = (1 << 32) - 1


class WindowSketch:
    """A count may be too high, if keys share counters, but is never too low while it is below 255.

    The window is the current quarter of `window_seconds` and the three before it. Shard p of P holds the blocks from
    p/P to (p+1)/P of all: the blocks of the keys that kernels/hashing assigns to owner p. If P does not divide
    `num_blocks`, both neighbours hold the block on their border.
    """

    def __init__(self, num_blocks: int, shard: int, num_shards: int, window_seconds: int) -> None:
        self._num_blocks = num_blocks
        self._pane_seconds = max(1, window_seconds // NUM_PANES)
        self.first = shard * num_blocks // num_shards
        self.num = -(-(shard + 1) * num_blocks // num_shards) - self.first
        words = Memory(BLOCK_BYTES * self.num).array(np.uint32)[: NUM_WORDS * self.num]
        self._words: npt.NDArray[np.uint32] = words.reshape(self.num, NUM_WORDS)

    def count(self, keys: Keys, now: int) -> npt.NDArray[np.int64]:
        """Count one appearance of each key, in order. Returns the counts in the window, this appearance included.

        A counter saturates at 255 appearances per pane. `now` is in seconds; a clock that goes back is treated as one
        that stands still. Raises TableError, with nothing counted, if a key belongs to another shard.
        """
        blocks, counts = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
        num_outside = sketch.locate(keys, self._num_blocks, self.first, self.num, blocks)
        if num_outside:
            raise TableError(f"window counters: {num_outside} of {len(keys)} keys belong to other servers")
        sketch.count(self._words, keys, blocks, min(max(now // self._pane_seconds, 0), _LAST_PANE), counts)
        return counts

    def blocks(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """A copy of the blocks with the numbers start..stop, which this shard must hold; shape (n, 64)."""
        if not self.first <= start <= stop <= self.first + self.num:
            raise IndexError(f"blocks {start}..{stop} are not all among {self.first}..{self.first + self.num}")
        found: npt.NDArray[np.uint8] = self._words[start - self.first : stop - self.first].copy().view(np.uint8)
        return found

    def load(self, start: int, blocks: npt.NDArray[np.uint8]) -> None:
        """Merge a range of saved blocks, numbered from `start` on. Blocks of other shards are ignored.

        In a new sketch the result is what was saved. A block that already has counts, or that comes twice because two
        servers held it, gets the elementwise maximum, so that no key is counted too low.
        """
        if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] != BLOCK_BYTES:
            raise TableError(
                f"window counters: expected uint8 blocks of shape (n, {BLOCK_BYTES}), found {blocks.dtype} of shape "
                f"{blocks.shape}"
            )
        low, high = max(start, self.first), min(start + len(blocks), self.first + self.num)
        if low < high:
            words = np.array(blocks[low - start : high - start], order="C").view(np.uint32)
            sketch.absorb(self._words[low - self.first : high - self.first], words)

    @property
    def num_bytes(self) -> int:
        """Bytes of all counters: keys are spread over all of them, so all pages are soon in use."""
        return BLOCK_BYTES * self.num
