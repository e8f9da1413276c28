"""Rows that were found before: as a search finds them now, whatever left memory in between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchfleet.ps.kernels.key_search import keep_found
from torchfleet.ps.kernels.statistics import NEVER
from torchfleet.ps.tables.rows import kept_requests
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.tiered_table import TieredTable
from torchfleet.ps.tables.tiers import tiers
from torchfleet.ps.tables.tiers.hot_rows import HotRows

DIM = 3
MEMORY = 64 << 20
NUM_HOT = 1000


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TieredTable:
    """1,000 of 4,000 rows are in memory; requests of one key are kept, too."""
    monkeypatch.setattr(tiers.Tiers, "max_hot", property(lambda _: NUM_HOT))
    monkeypatch.setattr("torchfleet.ps.tables.tiered_table.FEWEST_ROWS", 1)
    monkeypatch.setattr(tiers, "SWEEP", 64)
    monkeypatch.setattr(kept_requests, "FEWEST_KEYS", 1)
    made = TieredTable(TableSpec("t", dim=DIM), 1 << 30, None, TierStorage(MEMORY, str(tmp_path)))
    for start in range(0, 4000, 500):
        made.look_up(keys_from(start, 500))
    return made


def keys_from(start: int, num: int) -> np.ndarray:
    return np.arange(start, start + num, dtype=np.uint64) * np.uint64(2654435761)


def searched(table: TieredTable, keys: np.ndarray) -> np.ndarray:
    return table.tiers.hot.find(keys, 0)


def test_rows_are_where_a_search_finds_them(table: TieredTable) -> None:
    """Requests of which some rows left memory, came back to other places, or were dropped."""
    dice = np.random.default_rng(0)
    requests = [np.unique(keys_from(int(dice.integers(0, 3900)), 100)[dice.random(100) < 0.7]) for _ in range(12)]
    num_moved = 0
    for _ in range(300):
        keys = requests[dice.integers(len(requests))]
        if dice.random() < 0.1:
            table.erase(keys[:5])
        before = table.tiers._found._requests.get(keys)
        at = table.tiers.bring(keys)
        assert np.array_equal(at, searched(table, keys))
        num_moved += before is not None and not np.array_equal(before[0], at)
        table.look_up(keys)
        table.look_up(keys_from(int(dice.integers(0, 3500)), 400))  # others leave memory
    assert num_moved > 20


def test_a_push_behind_its_pull_searches_nothing(table: TieredTable, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_from(0, 300)
    pulled = table.look_up(keys)
    table.look_up(keys_from(500, 400))  # makes rows leave, but none that was used this late

    def refuse(self: HotRows, keys: np.ndarray, num_words: int) -> np.ndarray:
        raise AssertionError(f"a search for {len(keys)} keys")

    monkeypatch.setattr(HotRows, "find", refuse)
    table.push(keys, np.ones((300, DIM), np.float32))
    monkeypatch.undo()
    assert not np.array_equal(table.look_up(keys), pulled)


def test_a_pull_that_was_foreseen_searches_only_what_was_on_disk(
    table: TieredTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = table.index.keys_of(np.flatnonzero(table.tiers.hot.used[: table.index.num_row_numbers] != NEVER)[:200])
    keys = np.concatenate([hot, np.setdiff1d(keys_from(0, 50), hot)])
    table.foresee(keys)
    sizes: list[int] = []
    find = HotRows.find

    def counted(self: HotRows, some: np.ndarray, num_words: int) -> np.ndarray:
        sizes.append(len(some))
        return find(self, some, num_words)

    monkeypatch.setattr(HotRows, "find", counted)
    assert np.array_equal(table.tiers.bring(keys), find(table.tiers.hot, keys, 0))
    assert sizes == [len(keys) - len(hot)]


def test_old_requests_are_dropped(table: TieredTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.tiers._found._requests, "_most_keys", 1000)
    for start in range(0, 2000, 300):
        table.look_up(keys_from(start, 300))
    requests = table.tiers._found._requests
    assert requests.num_keys == sum(len(keys) for keys, _ in requests._kept.values()) == 900
    table.erase(keys_from(0, 1))
    assert (requests.num_keys, len(requests._kept)) == (0, 0)


def test_a_row_is_kept_if_it_is_in_use_and_has_the_key() -> None:
    """Against the same conditions in numpy."""
    dice = np.random.default_rng(1)
    words = dice.integers(0, 4, (500, 5), np.uint32)
    words[:, 1] = 0
    used = np.where(dice.random(500) < 0.3, NEVER, np.uint32(7)).astype(np.uint32)
    keys, at = dice.integers(0, 4, 1000).astype(np.uint64), dice.integers(-1, 500, 1000)
    is_kept = (at >= 0) & (used[at] != NEVER) & (words[at, 0] == keys)
    expected = np.where(is_kept, at, -1)
    ticks = used.copy()
    ticks[at[is_kept]] = 9
    keep_found(words, used, np.uint32(9), keys, at, 5)
    assert np.array_equal(at, expected)
    assert np.array_equal(used, ticks)
    assert 100 < is_kept.sum() < 900
