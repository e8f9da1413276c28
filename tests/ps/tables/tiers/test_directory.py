"""The directory beside a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.tiers.directory import Directory

COLD = 1 << 20  # places from here on are on disk


def keys_of(numbers: range) -> np.ndarray:
    return np.arange(numbers.start, numbers.stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def filled(num: int) -> tuple[Directory, np.ndarray, np.ndarray]:
    made, keys, places = Directory(2 * num, COLD), keys_of(range(num)), COLD + np.arange(num)
    for start in range(0, num, 700):
        made.insert(keys[start : start + 700], places[start : start + 700])
    return made, keys, places


def found(directory: Directory, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Whether each place is among those that the directory offers for its key."""
    skips, right = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
    for _ in range(8):
        offered = directory.find_cold(keys, skips)
        right |= offered == places
        skips += 1
    return right


def test_every_key_is_found_and_few_others_are():
    directory, keys, places = filled(200_000)
    assert found(directory, keys, places).all()
    others = directory.find_cold(keys_of(range(200_000, 400_000)), np.zeros(200_000, np.int64))
    assert (others >= 0).mean() < 0.001


def test_a_row_takes_at_most_ten_bytes():
    directory, _, _ = filled(300_000)
    assert directory.num_keys == 300_000
    assert directory.num_bytes / directory.num_keys <= 10


def test_keys_move_and_leave():
    directory, keys, places = filled(50_000)
    in_memory = np.arange(10_000)
    directory.move(keys[:10_000], places[:10_000], in_memory)
    assert not found(directory, keys[:10_000], places[:10_000]).any()  # what is in memory is not offered
    directory.remove(keys[10_000:30_000], places[10_000:30_000])
    assert directory.num_keys == 30_000
    assert not found(directory, keys[10_000:30_000], places[10_000:30_000]).any()
    assert found(directory, keys[30_000:], places[30_000:]).all()
    directory.insert(keys[10_000:30_000], places[10_000:30_000])
    assert found(directory, keys[10_000:], places[10_000:]).all()


def test_removing_a_key_that_is_elsewhere_is_a_bug():
    directory, keys, places = filled(100)
    with pytest.raises(RuntimeError):
        directory.remove(keys[:1], places[1:2])


@pytest.mark.parametrize("num", [1, 7, 1000])
def test_a_walk_meets_every_place_once(num: int):
    directory, _, places = filled(20_000)
    met, cursor = [], 0
    while True:
        some, cursor = directory.places_from(cursor, num)
        met.append(some)
        if not cursor:
            break
    assert np.array_equal(np.sort(np.concatenate(met)), places)


def test_a_full_directory_takes_nothing_more():
    directory, keys, places = filled(1000)
    more = keys_of(range(1000, 2001))
    with pytest.raises(TableError):
        directory.insert(more, COLD + np.arange(1000, 2001))
    assert directory.num_keys == 1000
    assert found(directory, keys, places).all()
