"""Samples as rows of 32-bit words: the output of parsers, and the input of batches and of the global shuffle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import batches

Index = npt.NDArray[np.int64]


class SampleRows(NamedTuple):
    """Row i is words[starts[i]:starts[i + 1]]."""

    words: npt.NDArray[np.uint32]
    starts: Index

    @property
    def num(self) -> int:
        return len(self.starts) - 1

    def pick(self, index: Index) -> SampleRows:
        """A copy of the rows with these indices, in this order."""
        words = np.empty(batches.total_words(self.starts, index), np.uint32)
        starts = np.empty(len(index) + 1, np.int64)
        batches.gather_rows(self.words, self.starts, index, words, starts)
        return SampleRows(words, starts)


NO_ROWS = SampleRows(np.empty(0, np.uint32), np.zeros(1, np.int64))
