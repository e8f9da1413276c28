"""Reads batches of (word, context word) pairs for SkipGram from a corpus of ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchfleet.apps.word2vec.corpus import Corpus, Ids
from torchfleet.base.errors import DataError
from torchfleet.ps.kernels.skip_pairs import draw_negatives, skip_pairs
from torchfleet.ps.kernels.skipgram import Words

WORDS_AT_ONCE = 10_000


class Pairs(NamedTuple):
    """A batch: words, a context word for each, negatives that all pairs share, and the number of corpus words read."""

    words: torch.Tensor
    trues: torch.Tensor
    negatives: torch.Tensor
    num_read: int


class PairReader:
    """Draws windows and negatives; the same seed gives the same batches."""

    def __init__(self, words: Words, window: int, num_shared: int, batch_size: int, seed: int) -> None:
        for name, number in (("window", window), ("num_shared", num_shared), ("batch_size", batch_size)):
            if number < 1:
                raise DataError(f"{name} must be at least 1, found {number}")
        self._words, self._window, self._num_shared, self._batch_size = words, window, num_shared, batch_size
        self._random = np.array([seed], np.uint64)
        places = WORDS_AT_ONCE + 2 * window + 4
        self._kept, self._begins, self._ends = (np.zeros(places, np.int32) for _ in range(3))

    def batches(self, corpus: Corpus, files: Sequence[str]) -> Iterator[Pairs]:
        """One pass over the files; the last batch may be short."""
        waiting, num_read = np.empty((2, 0), np.int64), 0
        for ids in corpus.blocks(files, WORDS_AT_ONCE):
            waiting = np.concatenate([waiting, self._pairs(ids)], axis=1)
            num_read += int(np.count_nonzero(ids >= 0))
            while waiting.shape[1] > self._batch_size:  # not >=: the last batch also counts the words after its pairs
                yield self._batch(waiting[:, : self._batch_size], num_read)
                waiting, num_read = waiting[:, self._batch_size :], 0
        if waiting.shape[1]:
            yield self._batch(waiting, num_read)

    def _pairs(self, ids: Ids) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        pairs = np.empty((2, 2 * self._window * len(ids)), np.int64)
        places = (self._kept, self._begins, self._ends)
        num = skip_pairs(ids, self._words, self._random, *places, self._window, pairs[0], pairs[1])
        return pairs[:, :num]

    def _batch(self, pairs: np.ndarray[tuple[int, int], np.dtype[np.int64]], num_read: int) -> Pairs:
        negatives = np.empty(self._num_shared, np.int64)
        draw_negatives(self._random, self._words, negatives)
        words, trues = torch.from_numpy(pairs.copy())
        return Pairs(words, trues, torch.from_numpy(negatives), num_read)
