"""The memory of a table's rows, in segments: a table grows by another segment, and rows never move."""

from __future__ import annotations

import torch

ALIGN_WORDS = 16  # segments begin at multiples of 64 bytes, so that distances between them count in these units
LEAST_SHIFT, MOST_SHIFT = 6, 20  # log2 of the rows in a chunk
ONE_SEGMENT = 31  # the same for a kernel, of a memory of one segment: all slots are in its first chunk


class RowMemory:
    """Rows of `width` float32 words, numbered from 0 over all segments.

    A chunk is 2^shift rows. `offsets[c]` is the distance of chunk c from the begin of the first segment, in units of
    ALIGN_WORDS words: a kernel finds a row with one pointer and this array.
    """

    def __init__(self, width: int, num_rows: int, device: torch.device, is_fixed: bool = False) -> None:
        """`is_fixed`: exactly this many rows, which never become more."""
        self.width, self.device, self._is_fixed = width, device, is_fixed
        self.shift = min(max(max(num_rows - 1, 1).bit_length(), LEAST_SHIFT), MOST_SHIFT)
        self.segments: list[torch.Tensor] = []
        self.num_rows = 0
        self.offsets = torch.empty(0, dtype=torch.int64, device=device)
        self.grow(num_rows)

    @property
    def num_bytes(self) -> int:
        return 4 * self.width * self.num_rows

    def rounded(self, num_rows: int) -> int:
        """`num_rows`, rounded up to whole chunks."""
        if self._is_fixed:
            return num_rows
        return -(-num_rows >> self.shift) << self.shift

    def grow(self, num_rows: int) -> None:
        """Add a segment of at least `num_rows` zeroed rows. Raises torch.OutOfMemoryError if there is no memory."""
        num_rows = self.rounded(num_rows)
        segment = torch.zeros(num_rows, self.width, dtype=torch.float32, device=self.device)
        first = self.segments[0] if self.segments else segment
        distance, rest = divmod(segment.data_ptr() - first.data_ptr(), 4 * ALIGN_WORDS)
        assert rest == 0, "torch aligns memory to 64 bytes"
        chunk_words = (1 << self.shift) * self.width
        starts = torch.arange(-(-num_rows >> self.shift), dtype=torch.int64, device=self.device)
        self.offsets = torch.cat([self.offsets, distance + starts * (chunk_words // ALIGN_WORDS)])
        self.segments.append(segment)
        self.num_rows += num_rows

    def read(self, slots: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The words start..stop of these rows, which must exist, in a new tensor."""
        if len(self.segments) == 1:
            return self.segments[0][:, start:stop].index_select(0, slots)
        out = torch.empty(len(slots), stop - start, dtype=torch.float32, device=self.device)
        for segment, of, at in self._split(slots):
            out[of] = segment[:, start:stop].index_select(0, at)
        return out

    def write(self, slots: torch.Tensor, start: int, words: torch.Tensor) -> None:
        """The inverse of `read`; the rows must be distinct."""
        stop = start + words.shape[1]
        for segment, of, at in self._split(slots):
            segment[at, start:stop] = words if of is None else words[of]

    def _split(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """(segment, places in `slots` of its rows, their numbers in the segment); None for all places."""
        if len(self.segments) == 1:
            return [(self.segments[0], None, slots.long())]
        parts: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        first = 0
        for segment in self.segments:
            of = ((slots >= first) & (slots < first + len(segment))).nonzero().squeeze(1)
            parts.append((segment, of, slots[of].long() - first))
            first += len(segment)
        return parts
