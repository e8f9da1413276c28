"""Merging: distinct keys and sums by key, against a dict, np.unique and np.add.at."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import twins

from torchfleet.ps.kernels import lookup
from torchfleet.ps.kernels.merge import SALT, sum_by_key, unique, unique_places
from torchfleet.ps.kernels.team import TEAM

keys = st.lists(
    st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 20) | st.integers(0, 2**64 - 1), max_size=200
)
floats = st.floats(-(2.0**100), 2.0**100, width=32)


def zipf_batch(num: int = 26_000, dim: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """A batch as a recommender's: 1,000 samples of 26 features, whose keys repeat."""
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.2, num).astype(np.uint64)
    return twins.mix(ids), rng.standard_normal((num, dim), np.float32)


@given(keys)
def test_unique_gives_keys_in_order_of_first_appearance_and_the_way_back(keys):
    keys = np.array(keys, np.uint64)
    distinct, inverse = unique(keys)
    expected, expected_inverse = twins.unique(keys)
    assert distinct.tolist() == expected.tolist()
    assert inverse.tolist() == expected_inverse.tolist()
    assert inverse.dtype == np.int32
    assert (distinct[inverse] == keys).all()
    assert sorted(distinct.tolist()) == np.unique(keys).tolist()


@pytest.fixture
def threads(request):
    TEAM.resize(request.param)
    yield request.param
    TEAM.resize(1)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("num_distinct", [100, 16_384, 16_385, 40_000, 70_000])
def test_unique_of_a_long_batch_is_the_same_by_any_number_of_threads(num_distinct, threads):
    """Places grow from 2^15, of which at most half are taken."""
    rng = np.random.default_rng(num_distinct)
    keys = twins.mix(np.concatenate([np.arange(num_distinct), rng.integers(0, num_distinct, 1000)]).astype(np.uint64))
    keys = rng.permutation(keys)
    distinct, inverse, places = unique_places(keys)
    assert (distinct[inverse] == keys).all()
    _, first = np.unique(keys, return_index=True)
    assert (distinct == keys[np.sort(first)]).all()
    assert sorted(places[places > 0]) == list(range(1, num_distinct + 1))
    index = np.empty(3, np.int32)
    assert lookup.index_of(np.array([keys[5], 12345, keys[0]], np.uint64), places, distinct, index, SALT) == 1
    assert index.tolist() == [inverse[5], lookup.ABSENT, 0]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 8) | st.integers(0, 2**64 - 1), floats, floats, floats), max_size=100))
def test_sums_are_equal_to_adding_in_order_in_float32(rows):
    keys = np.array([row[0] for row in rows], np.uint64)
    grads = np.array([row[1:] for row in rows], np.float32).reshape(-1, 3)
    expected_keys, expected = twins.sum_by_key(keys, grads)
    distinct, sums = sum_by_key(keys, grads)
    assert distinct.tolist() == expected_keys.tolist()
    assert sums.dtype == np.float32
    assert twins.same_bits(sums, expected)


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 10, 16, 33])
def test_sums_of_a_long_batch_are_equal_to_adding_in_order(dim):
    keys, grads = zipf_batch(5000, dim)
    distinct, sums = sum_by_key(keys, grads)
    expected_keys, expected = twins.sum_by_key(keys, grads)
    assert (distinct == expected_keys).all()
    assert twins.same_bits(sums, expected)


def test_a_batch_without_repeats_is_given_back_itself():
    keys, grads = np.arange(100, dtype=np.uint64), np.ones((100, 4), np.float32)
    distinct, sums = sum_by_key(keys, grads)
    assert distinct is keys
    assert sums is grads


def test_an_empty_batch_has_no_keys():
    distinct, inverse = unique(np.empty(0, np.uint64))
    assert (len(distinct), len(inverse)) == (0, 0)


def test_inputs_are_left_alone_and_may_be_read_only():
    keys, grads = zipf_batch(1000)
    before = keys.copy(), grads.copy()
    keys.flags.writeable = grads.flags.writeable = False
    sum_by_key(keys, grads)
    assert (keys == before[0]).all()
    assert (grads == before[1]).all()


def seconds(function, *arguments) -> float:
    begin = time.thread_time()
    function(*arguments)
    return time.thread_time() - begin


def speedup(ours, theirs, rounds: int) -> float:
    """Ratio of the least processor times; the two take turns, so that a busy machine slows both."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return min(pair[1] for pair in pairs) / min(pair[0] for pair in pairs)


def test_unique_takes_less_than_half_the_time_of_numpys():
    keys, _ = zipf_batch()
    assert speedup(lambda: unique(keys), lambda: np.unique(keys, return_inverse=True), 15) >= 2


def test_sums_by_key_take_less_than_half_the_time_of_numpys():
    keys, grads = zipf_batch()

    def with_numpy() -> None:
        distinct, inverse = np.unique(keys, return_inverse=True)
        np.add.at(np.zeros((len(distinct), 10), np.float32), inverse, grads)

    assert speedup(lambda: sum_by_key(keys, grads), with_numpy, 15) >= 2


def test_keys_chosen_to_collide_cost_no_more_than_others():
    """A worker chooses the keys that a server merges. With a hash that everybody knows, 20,000 keys that share its
    middle bits are looked up by walking past all those before: minutes for a million, and the server stands still."""
    hostile = np.array([twins.unmix(low) for low in range(20_000)], np.uint64)
    harmless = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    assert speedup(lambda: unique(harmless), lambda: unique(hostile), 3) < 30
