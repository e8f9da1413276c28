"""Subsampling of frequent words and negative sampling: the probabilities of each word, as the kernels take them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.preprocessing import keep_probabilities
from torchfleet.apps.word2vec.vocabulary import Vocabulary
from torchfleet.base.errors import DataError
from torchfleet.ps.kernels.skipgram import ALWAYS, Words

_POWER = 0.75  # negatives are drawn from count^0.75


def word_chances(vocabulary: Vocabulary, sample: float, train_unknown: bool = False) -> Words:
    """`sample` is the frequency above which words are left out at random (0: no word is left out).

    <UNK> is no word: it is always left out, and never a negative, unless `train_unknown` is True.
    """
    keep = np.minimum(keep_probabilities(vocabulary, sample) * 2.0**32, ALWAYS)
    weights = vocabulary.counts.astype(np.float64) ** _POWER
    if vocabulary.unknown is not None and not train_unknown:
        keep[vocabulary.unknown] = weights[vocabulary.unknown] = 0.0
    if np.count_nonzero(weights) < 2:
        raise DataError(
            f"word vectors need at least two words, found {np.count_nonzero(weights)} in the dictionary (<UNK> does "
            "not count). Use a larger text, or a smaller min_count."
        )
    return Words(keep.astype(np.uint32), *alias_table(weights))


def alias_table(weights: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
    """An alias table for draws in constant time: (probability × 2^32 of a slot's own word, its alternative word).

    Each slot is drawn with probability 1 / len(weights). Light words share their slot with heavy ones (Walker, 1977).
    """
    heights = weights / weights.sum() * len(weights)
    chance, other = np.ones(len(weights)), np.arange(len(weights), dtype=np.int32)
    order = np.argsort(-heights)  # pop() takes the lightest: rounding must not leave a word of weight 0 over
    light, heavy = list(order[heights[order] < 1]), list(order[heights[order] >= 1])
    while light and heavy:
        small, large = light.pop(), heavy[-1]
        chance[small], other[small] = heights[small], large
        heights[large] -= 1 - heights[small]
        if heights[large] < 1:
            light.append(heavy.pop())
    return np.minimum(chance * 2.0**32, ALWAYS).astype(np.uint32), other
