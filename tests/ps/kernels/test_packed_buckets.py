"""kernels/packed_buckets and packed_moves: the order that buckets keep, and keys that share their tag or their home.

The maps are PackedMaps, so that the kernels get the arrays they get in a server; their secret is known here.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.searches import examples
from support.twins import key_with_tag, packed_keys_and_rows, secret, set_secret

from torchfleet.ps.kernels import packed_buckets, packed_moves
from torchfleet.ps.kernels.packed_buckets import BUCKET, MISSING, UNMOVED
from torchfleet.ps.tables.rows.packed_map import Pace, PackedMap

FIRST_HIGH, LAST_HIGH = 0, 0xFFFFFFFF
SECRET_HERE = secret(77)


def make_map() -> PackedMap:
    index = PackedMap(1, 1 << 20)
    set_secret(index, 77)
    return index


def insert(index: PackedMap, keys) -> list[int]:
    keys = np.array(keys, np.uint64)
    rows = np.empty(len(keys), np.int64)
    index.find(keys, rows, 1)
    index.insert_missing(keys, rows)
    return rows.tolist()


def find(index: PackedMap, keys) -> list[int]:
    keys = np.array(keys, np.uint64)
    rows = np.full(len(keys), 12345, np.int64)
    num_missing = index.find(keys, rows, 1)
    assert num_missing == (rows == MISSING).sum()
    return rows.tolist()


def grow(index: PackedMap, num_buckets: int, num_moved: int) -> None:
    index._finish_migration()
    index._num_buckets[0] = index._state[UNMOVED] = index._num_buckets[1]
    index._num_buckets[1] = num_buckets
    index._migrate(num_moved)


@pytest.mark.parametrize("high", [FIRST_HIGH, 1, 0x80000000, LAST_HIGH])
@pytest.mark.parametrize("step", [1, 1 << 26])  # all with one tag; with different ones
def test_keys_with_one_home_are_told_apart(high, step):
    index = make_map()
    inside = [key_with_tag(high, low * step, SECRET_HERE) for low in range(40)]
    outside = [key_with_tag(high, low * step, SECRET_HERE) for low in range(40, 60)]
    rows = insert(index, [*inside, *inside[:10]])
    assert rows[:10] == rows[40:]
    assert find(index, inside) == rows[:40]
    assert find(index, outside) == [MISSING] * 20
    assert packed_keys_and_rows(index) == dict(zip(inside, rows, strict=False))
    assert index.erase(np.array([*outside, *inside[::3]], np.uint64)) == 14
    assert packed_keys_and_rows(index).keys() == set(inside) - set(inside[::3])


@pytest.mark.parametrize("high", [FIRST_HIGH, 0x80000000, LAST_HIGH])
def test_keys_of_one_home_all_get_a_row_however_many_they_are(high):
    index, keys = make_map(), [key_with_tag(high, low << 16, SECRET_HERE) for low in range(3000)]
    for start in range(0, 3000, 500):
        insert(index, keys[start : start + 500])
        assert packed_keys_and_rows(index).keys() == set(keys[: start + 500])
    insert(index, range(100))
    assert index.erase(np.array(keys[::2], np.uint64)) == 1500
    assert packed_keys_and_rows(index).keys() == {*keys[1::2], *range(100)}


def test_a_map_that_is_full_of_keys_of_the_last_home_has_room_for_all_of_them():
    index = PackedMap(1, 12 * 2000)
    keys = [key_with_tag(LAST_HIGH, low << 16, set_secret(index, 5)) for low in range(2000)]
    insert(index, keys)
    assert index.num_free_rows == 0
    assert packed_keys_and_rows(index).keys() == set(keys)


def test_a_stretch_ends_at_buckets_that_are_not_full():
    index = make_map()
    crowd = [key_with_tag(0x80000000, low, SECRET_HERE) for low in range(100)]  # the 16th bucket and six behind it
    insert(index, [*crowd, *range(200)])
    grow(index, 34, 13)  # nineteen would be left: in the middle of the run
    assert index._state[UNMOVED] <= 16
    assert packed_keys_and_rows(index).keys() == {*crowd, *range(200)}


# Few homes for many keys, so that buckets overflow into each other and erasing has holes to close.
crowded_highs = st.integers(0, 31).map(lambda i: i << 27) | st.sampled_from([0, 1, LAST_HIGH - 1, LAST_HIGH])
crowded_keys = st.tuples(crowded_highs, st.integers(0, 25)).map(lambda pair: key_with_tag(*pair, SECRET_HERE))
steps = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "erase"]), st.lists(crowded_keys, max_size=60)), max_size=25
)


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(st.integers(0, 33), steps, st.lists(crowded_keys, max_size=300))
def test_every_bucket_from_a_keys_home_to_its_own_is_full_whatever_was_inserted_and_erased(num_moved, steps, first):
    index = make_map()
    with mock.patch.object(Pace, "num_moves", return_value=0):
        insert(index, first)
        grow(index, int(index._num_buckets[1]) + 2, num_moved)
        expected = set(first)
        for step, keys in steps:
            if step == "insert":
                insert(index, keys)
                expected |= set(keys)
            else:
                assert index.erase(np.array(keys, np.uint64)) == len(expected & set(keys))
                expected -= set(keys)
            assert packed_keys_and_rows(index).keys() == expected
        index._finish_migration()
    assert packed_keys_and_rows(index).keys() == expected


def test_find_fetches_no_word_outside_a_row():
    index = make_map()
    rows = insert(index, range(3))
    for num_words in range(2):
        found = np.empty(3, np.int64)
        index.find(np.arange(3, dtype=np.uint64), found, num_words)
        assert found.tolist() == rows


def test_blocks_of_a_long_batch_are_all_looked_up():
    index = make_map()
    size = packed_buckets.BLOCK * 3 + 17
    rows = insert(index, range(size))
    assert find(index, range(size)) == rows
    assert find(index, range(size, 2 * size)) == [MISSING] * size


def test_a_run_that_is_longer_than_the_room_for_it_moves_with_more_room():
    index = make_map()
    insert(index, [key_with_tag(0x80000000, low, SECRET_HERE) for low in range(200)])
    before = packed_keys_and_rows(index)
    index._num_buckets[0], index._state[UNMOVED], index._num_buckets[1] = 32, 32, 34
    index._lifted, index._kept = index._lifting_buffers(4 * BUCKET)
    small = index._lifted, index._kept
    assert packed_moves.migrate(*index._arrays_with_marks(), *small, 32) == packed_moves.TOO_LONG
    assert packed_keys_and_rows(index).keys() == before.keys()
    index._finish_migration()
    assert len(index._kept) > 4 * BUCKET
    assert packed_keys_and_rows(index).keys() == before.keys()
