"""Skip-gram's pairs and negatives as arrays, for models that autograd trains; drawn as skipgram.py draws them."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchfleet.ps.kernels.jit import kernel
from torchfleet.ps.kernels.skipgram import Words, draw_negative, draw_reach, keep_words


@kernel
def skip_pairs(
    ids: Any, words: Words, random: Any, kept: Any, begins: Any, ends: Any, window: int, inputs: Any, trues: Any
) -> int:
    """Fill (inputs[p], trues[p]) with every kept word and the words of its window; returns how many pairs.

    There must be room for 2 · window · len(ids) of them, and for len(ids) + 2 · window + 4 kept words.
    """
    end, num = keep_words(ids, words, random, kept, begins, ends, window), 0
    for place in range(window, end):
        reach = draw_reach(random, window)
        for other in range(max(begins[place], place - reach), min(ends[place], place + reach + 1)):
            if other != place:
                inputs[num], trues[num] = kept[place], kept[other]
                num += 1
    return num


@kernel
def draw_negatives(random: Any, words: Words, out: Any) -> None:
    for i in range(len(out)):
        out[i] = np.int64(draw_negative(random, words))
