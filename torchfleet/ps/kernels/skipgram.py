"""Skip-gram with negative sampling, trained in place on whole tables, by any number of threads at once.

For a word w, a word o of its window, and negative words n drawn from count^0.75, with s = emb[w] · emb_w[o] + emb_b[o]:
    loss = softplus(-s(w, o)) + Σ_n softplus(s(w, n))                 num_negatives of them for every pair (w, o)
The windows of `len(d_emb)` words are one step of SGD on the sum of their losses. They share `len(d_emb_w)` negatives,
each of which counts num_negatives / len(d_emb_w) for every pair: the same loss on average, with far fewer rows to
fetch, and all of it small matrix products (`tiles.py`). Threads do not wait for each other (Hogwild: Recht et al.,
2011; shared negatives: Ji et al., 2016).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.tiles import add_row, make_combinations, make_products, prefetch_row
from torchfleet.ps.kernels.vector_instructions import REGISTERS

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
ALWAYS = 0xFFFFFFFF  # a word that is never dropped
_ONE, _HALF = np.float32(1), np.float32(0.5)
_VECTORS = 5 if REGISTERS == 32 else 2  # of each of four rows: 100 = 5 stretches of 5 vectors of 4
_products_1x4, _products_4x4 = make_products(1, 4), make_products(4, 4)
_set_1, _set_4 = make_combinations(1, 5, add=False), make_combinations(4, _VECTORS, add=False)
_add_1, _add_4 = make_combinations(1, 5, add=True), make_combinations(4, _VECTORS, add=True)


class Tables(NamedTuple):
    """What is trained: (words, width), (words, width), (words,); and how often each row has been changed."""

    emb: Any
    emb_w: Any
    emb_b: Any
    emb_changes: Any
    emb_w_changes: Any
    emb_b_changes: Any


class Words(NamedTuple):
    """Per word: how often it is kept (of 2^32); its place in the alias table of negatives: chance (of 2^32), other."""

    keep: Any
    chance: Any
    other: Any


class Scratch(NamedTuple):
    """One thread's own memory; `skipgram_scratch` makes it."""

    random: Any  # the generator's state
    kept: Any  # words that are not dropped, `window` others before and window + 4 behind them
    begins: Any  # where the line of each of them begins, and ends
    ends: Any
    firsts: Any  # of each window: its place in the row of `near`
    lasts: Any
    near: Any  # per word: logits, then gradients, of the words around it; itself in the middle
    far: Any  # per word: logits, then gradients, of the negatives
    negatives: Any  # this step's, and the next one's
    d_emb: Any
    d_emb_w: Any
    totals: Any  # pairs trained on; measured loss, and pairs measured


@inlined
def draw(random: Any) -> np.uint64:
    random[0] += _GOLDEN
    return mix(random[0])


@inlined
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + exp(-x)) to 2.3e-7, without a branch or a call: half of 1 + tanh(x / 2), tanh as a rational function.

    Odd polynomial of degree 13 over an even one of degree 6, fitted on ±7.9; beyond, it stays within 1.2e-7 of 0 or 1.
    """
    y = min(max(x * _HALF, np.float32(-7.9)), np.float32(7.9))
    z = y * y
    p = np.float32(-2.76076847742355e-16)
    p = p * z + np.float32(2.00018790482477e-13)
    p = p * z + np.float32(-8.60467152213735e-11)
    p = p * z + np.float32(5.12229709037114e-08)
    p = p * z + np.float32(1.48572235717979e-05)
    p = p * z + np.float32(6.37261928875436e-04)
    p = p * z + np.float32(4.89352455891786e-03)
    q = np.float32(1.19825839466702e-06)
    q = q * z + np.float32(1.18534705686654e-04)
    q = q * z + np.float32(2.26843463243900e-03)
    q = q * z + np.float32(4.89352518554385e-03)
    return _HALF + _HALF * y * p / q


@inlined
def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@inlined
def keep_words(ids: Any, words: Words, random: Any, kept: Any, begins: Any, ends: Any, window: int) -> int:
    """Drop frequent words at random; a negative id ends a line. Returns where the kept words end."""
    end = begin = window
    for i in range(len(ids) + 1):
        if i < len(ids) and ids[i] >= 0:
            keep = words.keep[ids[i]]
            if keep == ALWAYS or draw(random) >> _S32 < keep:
                kept[end], begins[end] = ids[i], begin
                end += 1
        else:
            for place in range(begin, end):
                ends[place] = end
            begin = end
    for place in range(end, end + window + 4):  # rows that are read, but have no effect
        kept[place] = 0
    return end


@inlined
def draw_reach(random: Any, window: int) -> int:
    return 1 + np.int64(((draw(random) >> _S32) * np.uint64(window)) >> _S32)


@inlined
def draw_negative(random: Any, words: Words) -> np.uint64:
    drawn = draw(random)
    place = ((drawn >> _S32) * np.uint64(len(words.chance))) >> _S32
    return place if drawn & _LOW < words.chance[place] else np.uint64(words.other[place])


@inlined
def _draw_negatives(words: Words, tables: Tables, scratch: Scratch, at: int) -> None:
    """Draw negatives from `at` on, for the next step, and prefetch their rows while this one computes."""
    for k in range(len(scratch.d_emb_w)):
        word = draw_negative(scratch.random, words)
        scratch.negatives[at + k] = word
        prefetch_row(tables.emb_w, word)


@inlined
def _ask_for_rows(tables: Tables, kept: Any, window: int, start: int, stop: int, end: int) -> None:
    for place in range(start, min(stop, end)):
        prefetch_row(tables.emb, kept[place])
    for place in range(start + window, min(stop + window, end)):
        prefetch_row(tables.emb_w, kept[place])


@inlined
def _near_logits(tables: Tables, scratch: Scratch, window: int, start: int, num: int) -> None:
    """Draw windows, of 1 to `window` words to each side within the line; then compute their words' logits."""
    width = scratch.near.shape[1]
    for i in range(num):
        place = start + i
        reach = draw_reach(scratch.random, window)
        first = max(window - reach, window - (place - scratch.begins[place]))
        last = min(window + reach + 1, window + scratch.ends[place] - place)
        for k in range(first, last, 4):
            _products_1x4(
                tables.emb, scratch.kept, place, tables.emb_w, scratch.kept, place - window + k,
                scratch.near, i * width + k, 0,
            )  # fmt: skip
        for k in range(first, last):
            scratch.near[i, k] += tables.emb_b[scratch.kept[place - window + k]]
        scratch.firsts[i], scratch.lasts[i] = first, last


@inlined
def _far_logits(tables: Tables, scratch: Scratch, start: int, num: int, at: int) -> None:
    num_far = len(scratch.d_emb_w)
    for i in range(0, num, 4):
        for k in range(0, num_far, 4):
            _products_4x4(
                tables.emb, scratch.kept, start + i, tables.emb_w, scratch.negatives, at + k,
                scratch.far, i * num_far + k, num_far,
            )  # fmt: skip
    for i in range(num):
        for k in range(num_far):
            scratch.far[i, k] += tables.emb_b[scratch.negatives[at + k]]


@inlined
def _measure(scratch: Scratch, window: int, num: int, share: np.float32) -> None:
    """Add this step's loss, before the step changes anything."""
    for i in range(num):
        pairs = scratch.lasts[i] - scratch.firsts[i] - 1
        loss = 0.0
        for k in range(scratch.firsts[i], scratch.lasts[i]):
            if k != window:
                loss += _softplus(-scratch.near[i, k])
        for k in range(scratch.far.shape[1]):
            loss += share * pairs * _softplus(scratch.far[i, k])
        scratch.totals[1] += loss
        scratch.totals[2] += pairs


@inlined
def _gradients(scratch: Scratch, window: int, num: int, rate: np.float32, share: np.float32) -> None:
    """Turn logits into updates: -rate · d loss / d logit; zero beyond the windows."""
    for i in range(num):
        for k in range(scratch.near.shape[1]):
            scratch.near[i, k] = rate * (_ONE - sigmoid(scratch.near[i, k]))
        for k in range(scratch.firsts[i]):
            scratch.near[i, k] = 0
        for k in range(scratch.lasts[i], scratch.near.shape[1]):
            scratch.near[i, k] = 0
        scratch.near[i, window] = 0
        pairs = scratch.lasts[i] - scratch.firsts[i] - 1
        scratch.totals[0] += pairs
        weight = -rate * share * np.float32(pairs)
        for k in range(scratch.far.shape[1]):
            scratch.far[i, k] = weight * sigmoid(scratch.far[i, k])


@inlined
def _update_rows(tables: Tables, scratch: Scratch, window: int, start: int, num: int, at: int, end: int) -> None:
    """All reads of emb come before all writes to it; rows of emb_w are written after the last read of
    their old values.
    """
    kept, near, far, num_far = scratch.kept, scratch.near, scratch.far, len(scratch.d_emb_w)
    width = near.shape[1]
    for i in range(num):
        first, last = scratch.firsts[i], scratch.lasts[i]
        around = start + i - window + first
        _set_1(near, i * width + first, 0, 1, tables.emb_w, kept, around, last - first, scratch.d_emb, i)
    for i in range(0, num, 4):
        _add_4(far, i * num_far, num_far, 1, tables.emb_w, scratch.negatives, at, num_far, scratch.d_emb, i)
    for k in range(0, num_far, 4):
        _set_4(far, k, 1, num_far, tables.emb, kept, start, num, scratch.d_emb_w, k)
    for place in range(max(window, start - window), min(end, start + num + window)):
        first, stop = max(0, place - window - start), min(num, place + window + 1 - start)
        # The word at `place` is in column place - (start + i) + window of row i: one less in every row.
        at_first, word = first * width + place - start - first + window, kept[place]
        _add_1(near, at_first, 0, width - 1, tables.emb, kept, start + first, stop - first, tables.emb_w, word)
    for k in range(num_far):
        add_row(tables.emb_w, scratch.negatives[at + k], scratch.d_emb_w, k)
    for i in range(num):
        add_row(tables.emb, kept[start + i], scratch.d_emb, i)


@inlined
def _update_biases(tables: Tables, scratch: Scratch, window: int, start: int, num: int, at: int) -> None:
    for i in range(num):
        for k in range(scratch.firsts[i], scratch.lasts[i]):
            tables.emb_b[scratch.kept[start + i - window + k]] += scratch.near[i, k]
    for k in range(scratch.far.shape[1]):
        total = np.float32(0)
        for i in range(num):
            total += scratch.far[i, k]
        tables.emb_b[scratch.negatives[at + k]] += total


@inlined
def _count_changes(tables: Tables, scratch: Scratch, window: int, start: int, num: int, at: int, end: int) -> None:
    for place in range(start, start + num):
        tables.emb_changes[scratch.kept[place]] += 1
    for place in range(max(window, start - window), min(end, start + num + window)):
        tables.emb_w_changes[scratch.kept[place]] += 1
        tables.emb_b_changes[scratch.kept[place]] += 1
    for k in range(len(scratch.d_emb_w)):
        tables.emb_w_changes[scratch.negatives[at + k]] += 1
        tables.emb_b_changes[scratch.negatives[at + k]] += 1


@kernel
def train(
    ids: Any, tables: Tables, words: Words, scratch: Scratch, window: int, num_negatives: int, rate: np.float32
) -> None:
    """Train on the words of `ids` (int32, a negative one after each line); the first step's loss is measured."""
    share = np.float32(num_negatives / len(scratch.d_emb_w))
    end = keep_words(ids, words, scratch.random, scratch.kept, scratch.begins, scratch.ends, window)
    num_windows, at, after = len(scratch.d_emb), 0, len(scratch.d_emb_w)
    _draw_negatives(words, tables, scratch, at)
    for start in range(window, end, num_windows):
        num = min(num_windows, end - start)
        _draw_negatives(words, tables, scratch, after)
        _ask_for_rows(tables, scratch.kept, window, start + num, start + num + num_windows, end)
        _near_logits(tables, scratch, window, start, num)
        _far_logits(tables, scratch, start, num, at)
        if start == window:
            _measure(scratch, window, num, share)
        _gradients(scratch, window, num, rate, share)
        _update_rows(tables, scratch, window, start, num, at, end)
        _update_biases(tables, scratch, window, start, num, at)
        _count_changes(tables, scratch, window, start, num, at, end)
        at, after = after, at


def skipgram_scratch(num_words: int, width: int, window: int, num_windows: int, num_shared: int, seed: int) -> Scratch:
    """Memory for one thread: calls of up to `num_words` words on rows of `width` numbers (`padded`).

    `num_windows` windows are a step and share `num_shared` negatives; both are rounded up to multiples of four.
    """
    num_windows, num_shared = -(-num_windows // 4) * 4, -(-num_shared // 4) * 4
    places = num_words + 2 * window + 4
    return Scratch(
        random=np.array([seed], np.uint64),
        kept=np.zeros(places, np.int32),
        begins=np.zeros(places, np.int32),
        ends=np.zeros(places, np.int32),
        firsts=np.zeros(num_windows, np.int32),
        lasts=np.zeros(num_windows, np.int32),
        near=np.zeros((num_windows, -(-(2 * window + 4) // 4) * 4), np.float32),
        far=np.zeros((num_windows, num_shared), np.float32),
        negatives=np.zeros(2 * num_shared, np.int32),
        d_emb=np.zeros((num_windows, width), np.float32),
        d_emb_w=np.zeros((num_shared, width), np.float32),
        totals=np.zeros(3),
    )
