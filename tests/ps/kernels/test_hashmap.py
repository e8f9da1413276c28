"""The hash map: the order that slots keep, and keys that only the exact search can tell apart.

The maps are KeyMaps, so that the kernels get the arrays they get in a server; their secret is known here.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.searches import examples
from support.twins import key_with_tag, keys_and_rows, scramble, secret, set_secret, unscramble

from torchfleet.ps.kernels import hashmap
from torchfleet.ps.kernels.hashmap import BUCKET, MISSING, MOVED, NEW, OLD
from torchfleet.ps.tables.rows import keymap
from torchfleet.ps.tables.rows.keymap import KeyMap

FIRST_TAG, LAST_TAG = 0, 0xFFFFFFFF
SECRET_HERE = secret(77)


def make_map() -> KeyMap:
    index = KeyMap(1, 1 << 20)
    set_secret(index, 77)
    return index


def insert(index: KeyMap, keys) -> list[int]:
    keys = np.array(keys, np.uint64)
    rows = np.empty(len(keys), np.int64)
    index.find(keys, rows, 1)
    index.insert_missing(keys, rows)
    return rows.tolist()


def find(index: KeyMap, keys) -> list[int]:
    keys = np.array(keys, np.uint64)
    rows = np.full(len(keys), 12345, np.int64)
    num_missing = index.find(keys, rows, 1)
    assert num_missing == (rows == MISSING).sum()
    return rows.tolist()


def erase(index: KeyMap, keys) -> int:
    return index.erase(np.array(keys, np.uint64))


def begin_migration(num_moved: int) -> KeyMap:
    """A map of 380 keys, 64 old home buckets of which about `num_moved` have been carried over."""
    index = make_map()
    insert(index, range(360))
    with mock.patch.object(keymap, "SMALL", 1), mock.patch.object(keymap, "MOVES_PER_KEY", 0):
        insert(index, range(360, 380))
        index._migrate(max(0, num_moved - int(index._state[MOVED])))
    assert index._migrating
    assert 0 < index._state[MOVED] < index._num_buckets[OLD]
    return index


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_unscramble_is_the_inverse_of_scramble(x, seed):
    assert unscramble(scramble(x, secret(seed)), secret(seed)) == x
    assert scramble(unscramble(x, secret(seed)), secret(seed)) == x


@pytest.mark.parametrize("tag", [FIRST_TAG, 1, 0x80000000, LAST_TAG])
def test_keys_with_one_tag_are_told_apart(tag):
    index = make_map()
    inside = [key_with_tag(tag, low, SECRET_HERE) for low in range(20)]
    outside = [key_with_tag(tag, low, SECRET_HERE) for low in range(20, 40)]
    rows = insert(index, inside)
    assert sorted(rows) == list(range(20))
    assert find(index, inside) == rows
    assert find(index, outside) == [MISSING] * 20
    assert keys_and_rows(index) == dict(zip(inside, rows, strict=True))


@pytest.mark.parametrize("tag", [FIRST_TAG, 0x80000000, LAST_TAG])
def test_erase_takes_only_the_key_itself_and_not_one_with_its_tag(tag):
    index = make_map()
    keys = [key_with_tag(tag, low, SECRET_HERE) for low in range(20)]
    rows = dict(zip(keys, insert(index, keys), strict=True))
    assert erase(index, [key_with_tag(tag, low, SECRET_HERE) for low in range(20, 30)]) == 0
    for key in keys[::3]:
        assert erase(index, [key]) == 1
        del rows[key]
        assert keys_and_rows(index) == rows
    assert find(index, keys) == [rows.get(key, MISSING) for key in keys]


def test_keys_with_one_tag_that_repeat_in_a_batch_get_one_row_each():
    index = make_map()
    keys = [key_with_tag(7, low, SECRET_HERE) for low in (0, 1, 0, 2, 1, 0)]
    assert insert(index, keys) == [0, 1, 0, 2, 1, 0]


@pytest.mark.parametrize("num_moved", [1, 32, 48])
@pytest.mark.parametrize("tag", [FIRST_TAG, 0x80000000, LAST_TAG])
def test_keys_with_one_tag_are_told_apart_while_the_map_grows(tag, num_moved):
    index = begin_migration(num_moved)
    inside = [key_with_tag(tag, low, SECRET_HERE) for low in range(30)]
    before = keys_and_rows(index)
    with mock.patch.object(keymap, "MOVES_PER_KEY", 0):
        rows = dict(zip(inside, insert(index, inside), strict=True))
    assert index._migrating
    assert keys_and_rows(index) == before | rows
    assert find(index, inside) == list(rows.values())
    assert find(index, [key_with_tag(tag, 99, SECRET_HERE)]) == [MISSING]
    assert erase(index, inside[::2]) == 15
    assert index._migrating
    assert keys_and_rows(index) == before | {key: rows[key] for key in inside[1::2]}
    index._finish_migration()
    assert keys_and_rows(index) == before | {key: rows[key] for key in inside[1::2]}


def test_migration_stops_only_behind_a_bucket_that_is_not_full():
    index = make_map()
    # 20 keys of one tag fill the first bucket, the second, and half of the third.
    insert(index, [key_with_tag(FIRST_TAG, low, SECRET_HERE) for low in range(20)])
    insert(index, range(340))
    with mock.patch.object(keymap, "SMALL", 1), mock.patch.object(keymap, "MOVES_PER_KEY", 0):
        insert(index, range(340, 380))
    assert index._migrating
    assert index._state[MOVED] >= 3
    keys_and_rows(index)


@pytest.mark.parametrize("tag", [FIRST_TAG, 0x80000000, LAST_TAG])
def test_keys_of_one_home_all_get_a_row_however_many_they_are(tag):
    index, keys = make_map(), [key_with_tag(tag, low, SECRET_HERE) for low in range(3000)]
    for start in range(0, 3000, 500):
        assert insert(index, keys[start : start + 500]) == list(range(start, start + 500))
        keys_and_rows(index)
    assert insert(index, range(100)) == list(range(3000, 3100))
    assert find(index, keys) == list(range(3000))
    assert erase(index, keys[::2]) == 1500
    assert find(index, keys[1::2]) == list(range(1, 3000, 2))
    keys_and_rows(index)


def test_keys_of_the_last_home_fit_into_slots_that_are_being_moved():
    keys = [key_with_tag(LAST_TAG, low, SECRET_HERE) for low in range(70)]
    index = begin_migration(1)
    before = keys_and_rows(index)
    with mock.patch.object(keymap, "MOVES_PER_KEY", 0):
        rows = dict(zip(keys, insert(index, keys), strict=True))
    assert index._migrating
    assert keys_and_rows(index) == before | rows
    index._finish_migration()
    assert keys_and_rows(index) == before | rows


# Few tags for many keys, so that buckets overflow into each other and erasing has holes to close.
crowded_tags = st.integers(0, 63).map(lambda i: i << 26) | st.sampled_from([0, 1, LAST_TAG - 1, LAST_TAG])
crowded_keys = st.tuples(crowded_tags, st.integers(0, 12)).map(lambda pair: key_with_tag(*pair, SECRET_HERE))
steps = st.lists(st.tuples(st.sampled_from(["insert", "erase"]), st.lists(crowded_keys, max_size=40)), max_size=25)


def run_steps(index: KeyMap, steps) -> None:
    rows = keys_and_rows(index)
    for step, keys in steps:
        if step == "insert":
            rows |= dict(zip(keys, insert(index, keys), strict=True))
        else:
            assert erase(index, keys) == len(rows.keys() & set(keys))
            rows = {key: row for key, row in rows.items() if key not in keys}
        assert keys_and_rows(index) == rows


@settings(max_examples=examples(60))
@given(steps)
def test_every_bucket_from_a_keys_home_to_its_own_is_full_whatever_was_inserted_and_erased(steps):
    run_steps(make_map(), steps)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.integers(1, 48), steps)
def test_the_same_holds_in_both_slot_arrays_while_the_map_grows(num_moved, steps):
    with mock.patch.object(keymap, "MOVES_PER_KEY", 0):
        run_steps(begin_migration(num_moved), steps)


def test_random_inserts_and_erases_at_a_high_load_keep_every_key_findable():
    rng = np.random.default_rng(5)
    with mock.patch.object(keymap, "MAX_LOAD", 0.95):  # 64 buckets, nearly all of them full
        index = make_map()
        live: set[int] = set()
        for _ in range(60):
            fresh = rng.integers(0, 2**64, 480 - len(live), dtype=np.uint64).tolist()
            insert(index, fresh)
            live |= set(fresh)
            assert int(index._num_buckets[NEW]) == 64
            assert keys_and_rows(index).keys() == live
            gone = rng.choice(np.array(sorted(live), np.uint64), 100, replace=False).tolist()
            assert erase(index, gone) == 100
            live -= set(gone)
            assert keys_and_rows(index).keys() == live
            assert find(index, gone) == [MISSING] * 100


def test_find_reads_old_slots_only_for_keys_that_were_not_carried_over():
    index = begin_migration(32)
    moved = int(index._state[MOVED])
    rows = keys_and_rows(index)
    tags = {key: scramble(key, SECRET_HERE) >> 32 for key in rows}
    carried = [key for key in rows if tags[key] * 64 >> 32 < moved]
    waiting = [key for key in rows if tags[key] * 64 >> 32 >= moved]
    assert carried
    assert waiting
    index._slots[OLD][: moved * BUCKET] = 0  # their pages are given back: they must not matter
    assert find(index, carried) == [rows[key] for key in carried]
    index._slots[OLD][:] = 0
    assert find(index, waiting) == [MISSING] * len(waiting)


def test_find_fetches_no_word_outside_a_row():
    """`num_words` up to the whole row, with the last row of the store at the very end of its memory."""
    index = KeyMap(30, 32 * 4 * 3)
    keys = np.arange(3, dtype=np.uint64)
    rows = np.empty(3, np.int64)
    index.find(keys, rows, 0)
    index.insert_missing(keys, rows)
    for num_words in range(31):
        index.find(keys, rows, num_words)
        assert rows.tolist() == [0, 1, 2]


def test_blocks_of_a_long_batch_are_all_looked_up():
    index = make_map()
    size = hashmap.BLOCK * 3 + 17
    rows = insert(index, range(size))
    assert find(index, range(size)) == rows == list(range(size))
    assert find(index, range(size, 2 * size)) == [MISSING] * size
