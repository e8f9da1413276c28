"""Samples as rows of 32-bit words: what parsers make, workers exchange and batches are filled from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchfleet.kernels import batches

Index = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Row i is words[starts[i]:starts[i + 1]]."""

    words: npt.NDArray[np.uint32]
    starts: Index

    @property
    def num(self) -> int:
        return len(self.starts) - 1

    def pick(self, index: Index) -> Rows:
        """A copy of some rows, in this order."""
        words = np.empty(batches.total_words(self.starts, index), np.uint32)
        starts = np.empty(len(index) + 1, np.int64)
        batches.gather_rows(self.words, self.starts, index, words, starts)
        return Rows(words, starts)


NO_ROWS = Rows(np.empty(0, np.uint32), np.zeros(1, np.int64))
