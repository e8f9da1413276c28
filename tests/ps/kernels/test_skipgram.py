"""Kernels of word2vec: against autograd in float64, numpy and plain Python.

The twin below replays the kernel's random draws, in their order, and knows nothing else of how it computes.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llvmlite import binding
from support import twins
from support.searches import examples
from torch.nn.functional import softplus

from torchfleet.ps.kernels import skipgram
from torchfleet.ps.kernels.skip_pairs import draw_negatives, skip_pairs
from torchfleet.ps.kernels.skipgram import ALWAYS, Scratch, Tables, Words, sigmoid, skipgram_scratch, train
from torchfleet.ps.kernels.tiles import add_row, make_combinations, make_products, prefetch_row
from torchfleet.ps.kernels.vector_instructions import LANES, padded

# Numbers are of order 0.1 to 1 (asserted: below 4). float32 rounds each to 6e-8 of itself, a logit is a sum of up to
# 300 products, a row takes up to a hundred moves: errors come to about 1e-6. A pair left out or counted twice moves a
# row by about rate · 0.5 · 0.5, 2e-3 and more.
TOLERANCE = 1e-5
SENTINEL = np.float32(-77.25)

Lines = Sequence[Sequence[int]]


# The twin


class Draws:
    """SplitMix64."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> int:
        self.state = (self.state + twins.GOLDEN) & twins.MASK
        return twins.mix(self.state)

    def kept(self, lines: Lines, words: Words) -> list[list[int]]:
        def is_kept(word: int) -> bool:
            keep = int(words.keep[word])
            return keep == ALWAYS or self.next() >> 32 < keep

        return [[word for word in line if is_kept(word)] for line in lines]

    def reach(self, window: int) -> int:
        return 1 + ((self.next() >> 32) * window >> 32)

    def negative(self, words: Words) -> int:
        drawn = self.next()
        place = (drawn >> 32) * len(words.chance) >> 32
        return place if drawn & 0xFFFFFFFF < words.chance[place] else int(words.other[place])


@dataclass
class Step:
    """One step of SGD: its words, its pairs (word, word of its window), the negatives that they share."""

    words: list[int]
    pairs: list[tuple[int, int]]
    negatives: list[int]

    def loss(self, emb: torch.Tensor, emb_w: torch.Tensor, emb_b: torch.Tensor, share: float) -> torch.Tensor:
        words, others = torch.tensor(self.pairs, dtype=torch.int64).reshape(-1, 2).T
        negatives = torch.tensor(self.negatives)
        near = (emb[words] * emb_w[others]).sum(dim=1) + emb_b[others]
        far = emb[words] @ emb_w[negatives].T + emb_b[negatives]
        return softplus(-near, threshold=700).sum() + share * softplus(far, threshold=700).sum()


def windows_of(line: Sequence[int], window: int, draws: Draws) -> list[list[tuple[int, int]]]:
    """For every word of a line its pairs."""
    found = []
    for place, word in enumerate(line):
        reach = draws.reach(window)
        others = [*line[max(0, place - reach) : place], *line[place + 1 : place + reach + 1]]
        found.append([(word, other) for other in others])
    return found


def steps_of(lines: Lines, words: Words, draws: Draws, window: int, num_windows: int, num_shared: int) -> list[Step]:
    """What one call of the kernel trains on. Negatives are drawn one step ahead, before the windows of this one."""
    kept = draws.kept(lines, words)
    places = [(line, place) for line in kept for place in range(len(line))]
    steps, following = [], [draws.negative(words) for _ in range(num_shared)]
    for start in range(0, len(places), num_windows):
        negatives, following = following, [draws.negative(words) for _ in range(num_shared)]
        step = Step([], [], negatives)
        for line, place in places[start : start + num_windows]:
            reach = draws.reach(window)
            step.words.append(line[place])
            around = [*range(max(0, place - reach), place), *range(place + 1, min(len(line), place + reach + 1))]
            step.pairs += [(line[place], line[other]) for other in around]
        steps.append(step)
    return steps


# Running both


def ids_of(lines: Lines) -> npt.NDArray[np.int32]:
    return np.array([number for line in lines for number in (*line, -1)], np.int32)


def make_tables(rng: np.random.Generator, num_words: int, dim: int) -> Tables:
    """All of order 0.1 to 1, logits too: words that are alike enough to be drawn apart or together."""
    size = min(0.5, 2.0 / math.sqrt(dim))

    def rows() -> npt.NDArray[np.float32]:
        made = np.zeros((num_words, padded(dim)), np.float32)
        made[:, :dim] = rng.uniform(-size, size, (num_words, dim))
        return made

    biases = rng.uniform(-0.5, 0.5, num_words).astype(np.float32)
    return Tables(rows(), rows(), biases, *(np.zeros(num_words, np.uint32) for _ in range(3)))


def make_words(rng: np.random.Generator, num_words: int, keeps: Sequence[float] = (1.0,)) -> Words:
    """Any table of negatives will do; a word is kept with one of these chances."""
    keep = np.minimum(rng.choice(keeps, num_words) * 2.0**32, ALWAYS).astype(np.uint32)
    chance = rng.integers(0, 1 << 32, num_words, np.uint32)
    return Words(keep, chance, rng.integers(0, num_words, num_words, np.int32))


def up_to_four(number: int) -> int:
    return -(-number // 4) * 4


def counts_of(words: Sequence[int], num_words: int) -> npt.NDArray[np.int64]:
    return np.bincount(np.array(words, np.int64), minlength=num_words)


class Both:
    """The kernel and the twin on the same tables; `call` trains both and compares all that the kernel has written."""

    def __init__(
        self,
        num_words: int = 12,
        dim: int = 7,
        window: int = 3,
        num_windows: int = 8,
        num_shared: int = 8,
        num_negatives: int = 5,
        rate: float = 0.02,
        keeps: Sequence[float] = (1.0,),
        seed: int = 0,
        room: int = 400,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dim, self.window, self.num_negatives, self.rate = dim, window, num_negatives, np.float32(rate)
        self.tables, self.words = make_tables(rng, num_words, dim), make_words(rng, num_words, keeps)
        self.num_windows, self.num_shared = up_to_four(num_windows), up_to_four(num_shared)
        self.scratch = skipgram_scratch(room, padded(dim), window, num_windows, num_shared, seed)
        self._draws = Draws(seed)
        first = (self.tables.emb[:, :dim], self.tables.emb_w[:, :dim], self.tables.emb_b)
        self.expected = [torch.tensor(table, dtype=torch.float64, requires_grad=True) for table in first]
        self.num_pairs = 0

    def call(self, lines: Lines, ids: npt.NDArray[np.int32] | None = None) -> list[Step]:
        steps = steps_of(lines, self.words, self._draws, self.window, self.num_windows, self.num_shared)
        before, totals = [np.copy(array) for array in self.tables], self.scratch.totals.copy()
        given_ids = ids_of(lines) if ids is None else ids
        train(given_ids, self.tables, self.words, self.scratch, self.window, self.num_negatives, self.rate)
        first_loss = 0.0
        for number, step in enumerate(steps):
            loss = self._apply(step)
            first_loss = loss if number == 0 else first_loss
        assert int(self.scratch.random[0]) == self._draws.state, "the kernel has drawn another number of numbers"
        self._compare_tables()
        self._compare_counts(steps, before)
        num_measured = len(steps[0].pairs) if steps else 0
        self.num_pairs += sum(len(step.pairs) for step in steps)
        assert self.scratch.totals[0] == self.num_pairs
        assert self.scratch.totals[2] - totals[2] == num_measured
        # Logits are off by 1e-6 at most, and so is the loss of each of 1 + num_negatives.
        measured = self.scratch.totals[1] - totals[1]
        assert measured == pytest.approx(first_loss, abs=1e-6 * (1 + self.num_negatives) * max(num_measured, 1))
        return steps

    def _apply(self, step: Step) -> float:
        loss = step.loss(*self.expected, self.num_negatives / self.num_shared)
        loss.backward()
        with torch.no_grad():
            for table in self.expected:
                table.sub_(float(self.rate) * table.grad)
                table.grad = None
        return float(loss.detach())

    def _compare_tables(self) -> None:
        for name, expected in zip(Tables._fields, self.expected, strict=False):
            found, wanted = getattr(self.tables, name), expected.detach().numpy()
            if wanted.ndim == 2:
                assert not found[:, self.dim :].any(), f"{name}: columns beyond the vectors must stay zero"
                found = found[:, : self.dim]
            assert np.abs(wanted).max() < 4, "not of the size that TOLERANCE is for"
            assert np.abs(found - wanted).max() < TOLERANCE, name

    def _compare_counts(self, steps: Sequence[Step], before: Sequence[np.ndarray]) -> None:
        num = len(self.tables.emb_b)
        of_words = counts_of([word for step in steps for word in step.words], num)
        of_negatives = counts_of([word for step in steps for word in step.negatives], num)
        kept, near, end = [word for step in steps for word in step.words], [], 0
        for step in steps:  # a step's windows reach into the words of the steps beside it
            start, end = end, end + len(step.words)
            near += kept[max(0, start - self.window) : end + self.window]
        of_neighbours = counts_of(near, num)
        for name, was, expected in (
            ("emb", 3, of_words),
            ("emb_w", 4, of_neighbours + of_negatives),
            ("emb_b", 5, of_neighbours + of_negatives),
        ):
            counted = getattr(self.tables, f"{name}_changes").astype(np.int64) - before[was]
            assert (counted == expected).all(), name
            has_changed = getattr(self.tables, name) != before[was - 3]
            rows = has_changed.any(axis=1) if has_changed.ndim == 2 else has_changed
            assert (counted[rows] > 0).all(), f"{name}: a row has changed that is not counted"


def random_lines(rng: np.random.Generator, num_words: int, lengths: Sequence[int]) -> list[list[int]]:
    return [rng.integers(0, num_words, length).tolist() for length in lengths]


# The update, against autograd


@pytest.mark.parametrize("dim", [1, 3, 7, 33, 100, 128, 300])
def test_the_update_is_that_of_autograd_for_every_dim(dim: int) -> None:
    rng = np.random.default_rng(dim)
    both = Both(num_words=40, dim=dim, window=5, num_windows=24, num_shared=32, rate=0.01)
    for _ in range(2):
        steps = both.call(random_lines(rng, 40, [30, 1, 17, 0, 40, 2]))
        assert len(steps) == 4  # the last of them short: 90 words


@pytest.mark.parametrize("window", range(1, 11))
def test_the_update_is_that_of_autograd_for_every_window(window: int) -> None:
    both, rng = Both(num_words=60, window=window, rate=0.005, num_windows=12), np.random.default_rng(window)
    for _ in range(2):
        both.call(random_lines(rng, 60, [25, window, window + 1, 2 * window + 1, 1, 20]))


@pytest.mark.parametrize(("num_windows", "num_shared"), [(1, 1), (3, 5), (4, 4), (5, 2), (7, 33), (13, 6), (24, 32)])
def test_steps_and_negatives_may_be_of_any_number(num_windows: int, num_shared: int) -> None:
    both = Both(num_words=30, num_windows=num_windows, num_shared=num_shared, rate=0.01)
    assert both.scratch.d_emb.shape == (up_to_four(num_windows), padded(7))
    assert both.scratch.d_emb_w.shape == (up_to_four(num_shared), padded(7))
    rng = np.random.default_rng(1)
    for num in (21, 34):
        both.call(random_lines(rng, 30, [num, 5]))


@pytest.mark.parametrize("num_negatives", [1, 5, 20])
def test_negatives_count_as_many_as_are_asked_for(num_negatives: int) -> None:
    both = Both(num_words=40, num_negatives=num_negatives, rate=0.005)
    both.call(random_lines(np.random.default_rng(2), 40, [20, 20]))


def test_words_repeat_within_a_step_as_word_neighbour_and_negative() -> None:
    both = Both(num_words=3, num_windows=8, rate=0.002)
    steps = both.call([[0, 0, 0, 1, 0, 0], [1, 1], [2, 0, 2, 0, 2, 2, 2, 2, 0, 1, 1, 2]])
    for step in steps:
        assert len(set(step.words)) < len(step.words)
        assert set(step.words) & set(step.negatives)
        assert any(word == other for word, other in step.pairs)


@pytest.mark.parametrize(
    "lines",
    [[], [[]], [[], [], []], [[3]], [[3], [4], [5], [3]], [[1, 2]], [[1], [], [2, 3], []], [[4, 4]], [[0] * 3]],
    ids=str,
)
def test_calls_with_hardly_any_words(lines: Lines) -> None:
    """Fewer than one step of them; a line of one word has no pairs, and a call without words changes nothing."""
    both = Both(num_windows=8, window=4)
    both.call([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])  # leaves its traces in the scratch memory
    before = [np.copy(table) for table in both.tables[:3]]
    steps = both.call(lines)
    if not any(step.pairs for step in steps):
        assert all((now == then).all() for now, then in zip(both.tables[:3], before, strict=True))
    both.call([[11, 0, 2], [5, 7]])


def test_a_negative_id_of_any_size_ends_a_line_and_the_end_of_a_call_does_too() -> None:
    lines = [[1, 2, 3], [4, 5], [6, 7]]
    ids = np.array([-1, 1, 2, 3, -5, 4, 5, np.iinfo(np.int32).min, -1, 6, 7], np.int32)
    Both().call(lines, ids)


def test_a_line_that_goes_on_in_the_next_call_is_two_lines() -> None:
    both = Both()
    both.call([[1, 2, 3]], np.array([1, 2, 3], np.int32))
    both.call([[4, 5]])


def test_words_that_are_left_out_are_not_there_for_their_neighbours_either() -> None:
    both, rng = Both(num_words=20, keeps=(0.0, 0.3, 0.7, 1.0), rate=0.01), np.random.default_rng(3)
    never = np.flatnonzero(both.words.keep == 0)
    assert len(never)
    first = both.tables.emb[never].copy()
    for _ in range(4):
        steps = both.call(random_lines(rng, 20, [30, 12, 1, 25]))
        assert not {word for step in steps for word in step.words} & set(never.tolist())
    assert (both.tables.emb[never] == first).all()
    both.call([never.tolist()])


def test_a_call_may_fill_all_the_room_there_is() -> None:
    line = [i % 12 for i in range(50)]
    for window in (1, 6):
        Both(room=50, window=window, num_windows=16).call([line], ids=np.array(line, np.int32))


@settings(max_examples=examples(25))
@given(
    lines=st.lists(st.lists(st.integers(0, 11), max_size=14), max_size=7),
    dim=st.sampled_from([1, 3, 7, 16, 33]),
    window=st.integers(1, 10),
    num_windows=st.integers(1, 30),
    num_shared=st.integers(1, 20),
    seed=st.integers(0, 2**64 - 1),
    keeps=st.sampled_from([(1.0,), (0.5, 1.0), (0.0, 0.9)]),
)
@example(lines=[[0] * 14] * 7, dim=33, window=10, num_windows=1, num_shared=1, seed=2**64 - 1, keeps=(0.9,))
def test_any_call_is_what_autograd_makes_of_it(
    lines: Lines, dim: int, window: int, num_windows: int, num_shared: int, seed: int, keeps: tuple[float, ...]
) -> None:
    both = Both(12, dim, window, num_windows, num_shared, rate=0.0005, seed=seed, keeps=keeps)
    both.call(lines)
    both.call(lines[::-1])


def test_a_rate_of_zero_changes_nothing_and_measures() -> None:
    both = Both(rate=0.0)
    before = [np.copy(table) for table in both.tables[:3]]
    both.call([[1, 2, 3, 4]])
    assert all((now == then).all() for now, then in zip(both.tables[:3], before, strict=True))
    assert both.scratch.totals[1] > 0


def test_logits_that_are_far_out_neither_overflow_nor_move_what_is_learned() -> None:
    both = Both(num_words=4, dim=3, num_windows=4)
    both.tables.emb[:, :3], both.tables.emb_w[:, :3], both.tables.emb_b[:] = 100.0, 100.0, 0.0
    words = Words(both.words.keep, np.zeros(4, np.uint32), np.full(4, 3, np.int32))  # every negative is word 3
    train(ids_of([[0, 1, 2]]), both.tables, words, both.scratch, 3, 5, np.float32(0.01))
    assert all(np.isfinite(table).all() for table in both.tables[:3])
    assert np.abs(both.tables.emb_w[:3, :3] - 100).max() < 1e-4, "s = 30,000: these pairs are learned"
    pairs = both.scratch.totals[2]
    assert both.scratch.totals[1] == pytest.approx(5 * pairs * 30_000, rel=1e-5)


# Its parts


@nb.njit
def sigmoids(x, out):
    for i in range(len(x)):
        out[i] = sigmoid(x[i])


def sigmoid_of(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    numbers = np.asarray(x, np.float32)
    out = np.empty_like(numbers)
    sigmoids(numbers, out)
    return out


def sigmoid_error(numbers: npt.NDArray[np.float32]) -> float:
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-numbers.astype(np.float64)))
    return float(np.abs(sigmoid_of(numbers) - exact).max())


def promised_error() -> float:
    """What sigmoid's docstring says."""
    found = re.search(r"to (\d\.?\d*e-\d+)", sigmoid.py_func.__doc__)
    assert found, "the docstring must tell how good it is"
    return float(found[1])


def test_sigmoid_is_as_exact_as_its_docstring_says() -> None:
    promised = promised_error()
    assert promised <= 5e-7
    # All floats around those with the largest errors, and every 32nd of the others.
    for begin, end, step in ((11.5, 12.0, 1), (0.25, 32.0, 32)):
        bits = np.arange(np.float32(begin).view(np.uint32), np.float32(end).view(np.uint32), step, np.uint32)
        numbers = bits.view(np.float32)
        assert sigmoid_error(np.concatenate([numbers, -numbers])) <= promised
    assert sigmoid_error(np.linspace(-0.25, 0.25, 100_001, dtype=np.float32)) <= promised


def test_sigmoid_saturates_between_0_and_1() -> None:
    ends = sigmoid_of([-np.inf, -3e38, -100.0, -16.0, 16.0, 100.0, 3e38, np.inf])
    assert (ends[:4] <= 2e-7).all()
    assert (ends[4:] >= 1 - 2e-7).all()
    everything = sigmoid_of(np.linspace(-20, 20, 400_001))
    assert everything.min() >= 0, "a loss would have a gradient of the wrong sign"
    assert everything.max() <= 1
    assert sigmoid_of([0.0])[0] == 0.5
    tiny = sigmoid_of(np.array([1e-45, -1e-45, 1e-38, -1e-38], np.float32))
    assert (tiny == 0.5).all()


def test_sigmoid_shows_what_is_no_number() -> None:
    assert np.isnan(sigmoid_of([np.nan])[0])


def test_padded_rows_are_whole_vectors() -> None:
    for dim in range(1, 70):
        assert padded(dim) % LANES == 0
        assert dim <= padded(dim) < dim + LANES


def products_of(num_x: int, num_y: int) -> Callable[..., None]:
    products = make_products(num_x, num_y)

    @nb.njit
    def run(X, x_rows, x_at, Y, y_rows, y_at, out, at, stride):
        products(X, x_rows, x_at, Y, y_rows, y_at, out, at, stride)

    return run


def combinations_of(num_out: int, num_vectors: int, add: bool) -> Callable[..., None]:
    combinations = make_combinations(num_out, num_vectors, add)

    @nb.njit
    def run(g, at, i_step, j_step, Y, y_rows, y_at, count, out, out_row):
        combinations(g, at, i_step, j_step, Y, y_rows, y_at, count, out, out_row)

    return run


def within_rounding(found: np.ndarray, exact: np.ndarray, sizes: np.ndarray, num_terms: int) -> bool:
    """`sizes`: Σ |terms|. Any order of adding, fused or not, is off by less than one rounding per term of it."""
    return bool((np.abs(found - exact) <= (num_terms + 1) * 2.0**-24 * sizes + 1e-30).all())


@pytest.mark.parametrize(("num_x", "num_y"), [(1, 1), (1, 4), (3, 2), (4, 4)])
def test_products_are_those_of_numpy_and_written_where_they_belong(num_x: int, num_y: int) -> None:
    run, rng = products_of(num_x, num_y), np.random.default_rng(num_x * 10 + num_y)
    for _ in range(20):
        width = LANES * int(rng.integers(1, 14))
        X, Y = (rng.normal(size=(int(rng.integers(1, 9)), width)).astype(np.float32) for _ in range(2))
        x_at, y_at, at = (int(rng.integers(0, 5)) for _ in range(3))
        stride = int(rng.integers(num_y, num_y + 4))
        x_rows = rng.integers(0, len(X), x_at + num_x + 2, np.int32)
        y_rows = rng.integers(0, len(Y), y_at + num_y + 2, np.int32)
        out = np.full((num_x + 1) * stride + at + 3, SENTINEL)
        run(X, x_rows, x_at, Y, y_rows, y_at, out, at, stride)
        xs, ys = X[x_rows[x_at : x_at + num_x]].astype(float), Y[y_rows[y_at : y_at + num_y]].astype(float)
        places = at + stride * np.arange(num_x)[:, None] + np.arange(num_y)
        assert within_rounding(out[places], xs @ ys.T, np.abs(xs) @ np.abs(ys.T), width)
        out[places] = SENTINEL
        assert (out == SENTINEL).all()


def test_products_may_all_go_to_places_in_one_row() -> None:
    """As the kernel calls it: one row of X, a stride of 0, a two-dimensional array for the results."""
    run, rng = products_of(1, 4), np.random.default_rng(0)
    X, out = rng.normal(size=(5, LANES)).astype(np.float32), np.zeros((3, 8), np.float32)
    run(X, np.array([4], np.int32), 0, X, np.array([0, 1, 4, 4], np.int32), 0, out, 8 + 3, 0)
    expected = np.zeros((3, 8))
    expected[1, 3:7] = X[[0, 1, 4, 4]].astype(float) @ X[4].astype(float)
    assert np.abs(out - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("num_out", "num_vectors", "add"), [(1, 5, False), (1, 5, True), (4, 2, True), (4, 5, False), (3, 1, True)]
)
def test_combinations_are_those_of_numpy_and_written_where_they_belong(
    num_out: int, num_vectors: int, add: bool
) -> None:
    run, rng = combinations_of(num_out, num_vectors, add), np.random.default_rng(num_out + num_vectors)
    for number in range(20):
        width, count = LANES * int(rng.integers(1, 14)), int(rng.integers(0, 9)) if number else 0
        Y = rng.normal(size=(int(rng.integers(1, 9)), width)).astype(np.float32)
        at, y_at, out_row = (int(rng.integers(0, 4)) for _ in range(3))
        i_step, j_step = ((count + 1, 1), (1, num_out + 1), (0, 2))[int(rng.integers(0, 3))]
        g = rng.normal(size=at + num_out * i_step + (count + 1) * j_step + 1).astype(np.float32)
        y_rows = rng.integers(0, len(Y), y_at + count + 1, np.int32)
        out = rng.normal(size=(out_row + num_out + 2, width)).astype(np.float32)
        before = out.astype(float)
        run(g, at, i_step, j_step, Y, y_rows, y_at, count, out, out_row)
        factors = g[at + i_step * np.arange(num_out)[:, None] + j_step * np.arange(count)].astype(float)
        ys, written = Y[y_rows[y_at : y_at + count]].astype(float), slice(out_row, out_row + num_out)
        first = before[written] if add else np.zeros((num_out, width))
        sizes = np.abs(first) + np.abs(factors) @ np.abs(ys)
        assert within_rounding(out[written], first + factors @ ys, sizes, count + 1)
        out[written] = before[written]
        assert (out == before).all()


def test_add_row_adds_one_row_and_prefetch_row_changes_nothing() -> None:
    @nb.njit
    def run(OUT, out_row, X, x_row):
        prefetch_row(OUT, out_row)
        prefetch_row(X, np.uint64(x_row))
        add_row(OUT, out_row, X, x_row)

    rng = np.random.default_rng(0)
    for width in (LANES, 3 * LANES, padded(300)):
        out, x = (rng.normal(size=(6, width)).astype(np.float32) for _ in range(2))
        expected = out.copy()
        expected[4] += x[1]
        run(out, 4, x, 1)
        assert twins.same_bits(out, expected)
        expected[2] += expected[2]
        run(out, 2, out, 2)  # a row that is added to itself
        assert twins.same_bits(out, expected)


# What is drawn


def binomial_is_likely(found: npt.ArrayLike, num: int, chances: npt.ArrayLike) -> bool:
    """Six standard deviations; the seeds are fixed, so that it holds always or never."""
    expected = num * np.asarray(chances, float)
    deviation = np.sqrt(np.maximum(expected * (1 - np.asarray(chances, float)), 1e-9))
    return bool((np.abs(np.asarray(found) - expected) <= 6 * deviation + 0.5).all())


def chi_square(found: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Per degree of freedom: about 1 if the distribution is right."""
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    return float(((found - expected) ** 2 / expected).sum() / (len(found) - 1))


def test_words_are_left_out_as_often_as_they_should_be() -> None:
    chances = [0.0, 0.01, 0.25, 0.5, 0.9, 1.0]
    words = Words(
        np.minimum(np.array(chances) * 2.0**32, ALWAYS).astype(np.uint32),
        np.full(6, ALWAYS, np.uint32),
        np.arange(6, dtype=np.int32),
    )
    tables = make_tables(np.random.default_rng(0), 6, 1)
    scratch = skipgram_scratch(12_000, padded(1), 1, 24, 4, seed=5)
    for _ in range(5):
        train(np.tile(np.arange(6, dtype=np.int32), 2000), tables, words, scratch, 1, 1, np.float32(0))
    assert binomial_is_likely(tables.emb_changes, 10_000, chances)
    assert tables.emb_changes[0] == 0
    assert tables.emb_changes[5] == 10_000


def test_negatives_follow_their_table() -> None:
    rng = np.random.default_rng(1)
    num = 50
    words = make_words(rng, num)
    words.chance[:10] = 0  # these are drawn only where another place stands for them
    words.other[:] = rng.integers(10, num, num)
    chances = np.zeros(num)
    np.add.at(chances, np.arange(num), words.chance / 2.0**32 / num)
    np.add.at(chances, words.other, (1 - words.chance / 2.0**32) / num)
    assert chances.sum() == pytest.approx(1)
    drawn = np.empty(200_000, np.int64)
    draw_negatives(np.array([77], np.uint64), words, drawn)
    counts = counts_of(drawn.tolist(), num)
    assert not counts[:10].any()
    assert chi_square(counts[10:], 200_000 * chances[10:]) < 2.5  # 39 degrees: beyond 2.5 once in 10^6
    draws = Draws(77)
    assert drawn[:500].tolist() == [draws.negative(words) for _ in range(500)]


def test_windows_are_as_often_of_every_size() -> None:
    window, num = 7, 20_000
    counts = np.bincount(pair_counts(num, window, seed=3)[window:-window] // 2, minlength=window + 1)
    assert counts[0] == 0
    assert chi_square(counts[1:], np.full(window, (num - 2 * window) / window)) < 6  # six degrees


# Pairs


def call_skip_pairs(ids: npt.NDArray[np.int32], words: Words, random: np.ndarray, window: int) -> list[tuple[int, int]]:
    """With memory of just the size that is asked for, and marks behind it."""
    places, room = len(ids) + 2 * window + 4, 2 * window * len(ids)
    kept, begins, ends = (np.full(places + 1, -9, np.int32) for _ in range(3))
    inputs, trues = (np.full(room + 1, -9, np.int64) for _ in range(2))
    num = skip_pairs(ids, words, random, kept[:-1], begins[:-1], ends[:-1], window, inputs[:-1], trues[:-1])
    assert (inputs[num:] == -9).all()
    assert (trues[num:] == -9).all()
    assert all(array[-1] == -9 for array in (kept, begins, ends))
    return list(zip(inputs[:num].tolist(), trues[:num].tolist(), strict=True))


def pair_counts(num: int, window: int, seed: int) -> npt.NDArray[np.int64]:
    """How many pairs each of `num` words of a line has; all are different, so that they can be told apart."""
    words = Words(np.full(num, ALWAYS, np.uint32), np.full(num, ALWAYS, np.uint32), np.arange(num, dtype=np.int32))
    pairs = call_skip_pairs(np.arange(num, dtype=np.int32), words, np.array([seed], np.uint64), window)
    assert all(0 < abs(word - other) <= window for word, other in pairs)
    return counts_of([word for word, _ in pairs], num)


@settings(max_examples=examples(60))
@given(
    lines=st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=8),
    window=st.integers(1, 10),
    seed=st.integers(0, 2**64 - 1),
    keeps=st.sampled_from([(1.0,), (0.5, 1.0), (0.0, 0.9), (0.0,)]),
)
def test_pairs_are_those_of_plain_python(lines: Lines, window: int, seed: int, keeps: tuple[float, ...]) -> None:
    words, draws = make_words(np.random.default_rng(seed), 10, keeps), Draws(seed)
    random = np.array([seed], np.uint64)
    for _ in range(2):
        found = call_skip_pairs(ids_of(lines), words, random, window)
        expected = [
            pair for line in draws.kept(lines, words) for around in windows_of(line, window, draws) for pair in around
        ]
        assert found == expected
        assert int(random[0]) == draws.state


def test_pairs_and_kernel_train_on_as_many_pairs() -> None:
    """On average: they draw the same windows from other parts of the stream."""
    lines = random_lines(np.random.default_rng(0), 10, [40] * 200)
    words = make_words(np.random.default_rng(1), 10, (0.5, 1.0))
    num = len(call_skip_pairs(ids_of(lines), words, np.array([1], np.uint64), 5))
    tables = make_tables(np.random.default_rng(2), 10, 1)
    scratch = skipgram_scratch(9000, padded(1), 5, 24, 4, seed=2)
    train(ids_of(lines), tables, words, scratch, 5, 5, np.float32(0))
    # About 6,000 words are kept, of 5.7 pairs with a deviation of 3: the sum's is 400, or 1 %.
    assert scratch.totals[0] == pytest.approx(num, rel=0.06)


# Compiled code


def arguments(dim: int = 100) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    scratch: Scratch = skipgram_scratch(10, padded(dim), 5, 24, 32, seed=0)
    return ids_of([[0, 1]]), make_tables(rng, 4, dim), make_words(rng, 4), scratch, 5, 5, np.float32(0.1)


def num_written_multiply_adds() -> int:
    """Those of the kernel's tiles: 1 × 4 and 4 × 4 products; two combinations of one row, five vectors at a time and
    one; two of four rows."""
    return 4 + 16 + 2 * (5 + 1) + 2 * 4 * (skipgram._VECTORS + 1)


@pytest.mark.long  # eight seconds of compiling
def test_the_kernel_computes_with_whole_vectors() -> None:
    """Products and gradients, in the machine code. Numba shows none that is from its cache: it is compiled anew."""
    train(*arguments())
    shown = train
    if train.stats.cache_hits:
        shown = nb.njit(nogil=True, error_model="numpy", _nrt=False)(train.py_func)
        shown(*arguments())
    (assembly,) = shown.inspect_asm().values()
    if platform.machine() in ("aarch64", "arm64"):
        multiply_add, divide = r"\bfmla[.\s]+(v\d+\.4s|4s)", r"\bfdiv[.\s]+(v\d+\.4s|4s)"
    elif binding.get_host_cpu_features().get("fma") and LANES > 4:
        register = {8: "ymm", 16: "zmm"}[LANES]
        multiply_add, divide = rf"\bvfmadd\d+ps\s.*%{register}\d+", r"\bvdivps\s.*%[yz]mm\d+"
    else:
        pytest.skip("a processor without vectors of multiply-adds")
    assert len(re.findall(multiply_add, assembly)) >= num_written_multiply_adds()
    assert len(re.findall(divide, assembly)) >= 2, "sigmoid is no longer computed for several logits at a time"


def test_callers_share_one_compiled_kernel() -> None:
    """Another type of an argument would be another eight seconds."""
    for dim in (1, 100):
        train(*arguments(dim))
    assert len(train.signatures) == 1
    assert len(skip_pairs.signatures) <= 1
