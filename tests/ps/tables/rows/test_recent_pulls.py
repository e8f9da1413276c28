"""Rows of pulled keys that wait for their push; and that a table with them is, bit for bit, one without."""

from __future__ import annotations

import numpy as np
import pytest

from torchfleet.ps.tables.rows import kept_requests, recent_pulls
from torchfleet.ps.tables.rows.kept_requests import FEWEST_KEYS
from torchfleet.ps.tables.rows.keymap import KeyMap
from torchfleet.ps.tables.rows.recent_pulls import RecentPulls
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

NUM = 2 * FEWEST_KEYS


def some_keys(start: int = 0, num: int = NUM) -> np.ndarray:
    return np.arange(start, start + num, dtype=np.uint64)


def some_rows(start: int = 0, num: int = NUM) -> np.ndarray:
    return np.arange(start, start + num, dtype=np.int64)


def test_a_push_takes_the_rows_of_its_pull_once() -> None:
    recent = RecentPulls(10_000)
    keys = some_keys()
    recent.note(keys, some_rows(7))
    keys[:] = 0  # the memory of a message is used again
    taken = recent.take(some_keys())
    assert taken is not None
    assert taken.tolist() == some_rows(7).tolist()
    assert recent.take(some_keys()) is None
    assert recent.num_bytes == 0


def test_other_keys_get_nothing_even_if_they_look_alike() -> None:
    recent = RecentPulls(10_000)
    alike = some_keys()
    alike[[1, 2]] = alike[[2, 1]]  # as many, and with the same first, middle and last key
    recent.note(some_keys(), some_rows())
    assert recent.take(alike) is None


def test_keys_that_repeat_have_to_be_summed_first() -> None:
    recent = RecentPulls(10_000)
    keys, rows = some_keys(), some_rows()
    keys[5], rows[5] = keys[9], rows[9]
    for _ in range(2):  # the marks of the first look are gone at the second
        recent.note(keys, rows)
        assert recent.take(keys) is None
    recent.note(some_keys(), some_rows())
    assert recent.take(some_keys()) is not None


def test_keys_that_were_pulled_are_not_searched_to_see_whether_the_map_must_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = KeyMap(20, 1 << 28)
    keys = some_keys(num=200_000)
    index.insert_missing(keys, np.full(len(keys), -1))
    index._grows_at = index.num_keys + 1  # as full as a map can be
    pulled = keys[:NUM].copy()
    index.recent.note(pulled, some_rows())
    num_searched = []
    monkeypatch.setattr(KeyMap, "find", lambda self, keys, *_: num_searched.append(len(keys)) or 0)
    index.reserve_for(pulled)
    assert num_searched == []
    index.reserve_for(keys[NUM : 20 * NUM])
    assert num_searched == [19 * NUM]


def test_few_keys_are_not_kept_and_old_pulls_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_pulls, "MOST_KEYS", 4 * NUM)
    recent = RecentPulls(100_000)
    recent.note(some_keys(num=FEWEST_KEYS - 1), some_rows(num=FEWEST_KEYS - 1))
    assert recent.num_bytes == 0
    for start in range(0, 6 * NUM, NUM):
        recent.note(some_keys(start), some_rows(start))
    assert recent.num_bytes == 16 * 4 * NUM
    assert recent.take(some_keys(NUM)) is None
    assert recent.take(some_keys(2 * NUM)) is not None


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_training_is_bit_equal_with_and_without_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls and pushes of two workers in turns, new keys, erased keys and keys that were never pulled."""
    found = []
    for fewest in (FEWEST_KEYS, 1 << 40):
        monkeypatch.setattr(kept_requests, "FEWEST_KEYS", fewest)
        table = SparseTable(
            TableSpec("t", dim=16, rule=Rule(name), initializer=Initializer("uniform", -1.0, 1.0)), 1 << 24
        )
        rng = np.random.default_rng(3)
        pulled = []
        for step in range(20):
            keys = np.unique(rng.integers(0, 3000, 700).astype(np.uint64))
            pulled.append(table.pull(keys))
            later = keys if step % 3 else np.concatenate([keys, keys[:5]])
            if step == 10:
                table.erase(keys[::2])  # between a pull and its push: such keys begin anew
            table.push(later, rng.standard_normal((len(later), 16)).astype(np.float32))
        found.append((np.concatenate(pulled), table.pull(some_keys(0, 3000))))
    assert (found[0][0] == found[1][0]).all()
    assert (found[0][1] == found[1][1]).all()
