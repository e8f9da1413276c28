"""A table on two tiers beside one in memory: the same requests, the same answers, bit for bit."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.grids import first_of
from support.messages import naming

from torchfleet.base.errors import TableError
from torchfleet.ps.tables import tiered_table
from torchfleet.ps.tables.kinds import make_table
from torchfleet.ps.tables.rows import kept_requests
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.table import OneSlice
from torchfleet.ps.tables.tiered_table import TieredTable
from torchfleet.ps.tables.tiers import cold_rows, hot_rows, pages, tiers

DIM = 5
MEMORY = 64 << 20
PLAIN = TableSpec("t", dim=DIM, rule=Rule("adagrad", lr=0.1), initializer=Initializer("normal", 0.0, 1.0))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """700 rows in memory; small blocks and segments, so that all of it is met by small tables."""
    monkeypatch.setattr(tiers.Tiers, "max_hot", property(lambda _: 700))
    monkeypatch.setattr(tiered_table, "FEWEST_ROWS", 1)
    monkeypatch.setattr(tiers, "SWEEP", 64)
    monkeypatch.setattr(kept_requests, "FEWEST_KEYS", 1)
    monkeypatch.setattr(pages, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(cold_rows.ColdRows.__init__, "__defaults__", (1 << 17,))


def pair(folder: Path, spec: TableSpec = PLAIN) -> tuple[SparseTable, TieredTable]:
    tiered = msgspec.structs.replace(spec, storage=TierStorage(MEMORY, str(folder)))
    plain, made = make_table(spec, 1 << 30), make_table(tiered, 1 << 30)
    assert isinstance(plain, SparseTable)
    assert isinstance(made, TieredTable)
    return plain, made


def some_keys(dice: np.random.Generator, num_keys: int = 5000) -> np.ndarray:
    drawn = dice.zipf(1.2, dice.integers(1, 200)) % num_keys
    return drawn.astype(np.uint64) * np.uint64(2654435761)


def rows_of(table: SparseTable, num: int = 1 << 16) -> dict[int, bytes]:
    """All rows with their state and statistics; a key that comes twice fails."""
    found: dict[int, bytes] = {}
    for keys, values, columns in table.chunks(num):
        parts = [np.ascontiguousarray(values)] + [columns[name] for name in sorted(columns)]
        for i, key in enumerate(keys.tolist()):
            assert key not in found
            found[key] = b"".join(part[i].tobytes() for part in parts)
    return found


def step(dice: np.random.Generator, both: tuple[SparseTable, TieredTable]) -> set[int]:
    """One random request to both, often for the keys of an earlier one; returns the keys that it erased."""
    what, keys = dice.integers(0, 10), some_keys(dice)
    earlier = list(both[1].tiers._found._requests._kept.values())
    if earlier and dice.random() < 0.4:
        keys = earlier[dice.integers(len(earlier))][0].copy()
    if dice.random() < 0.3:
        both[1].foresee(keys if dice.random() < 0.7 else some_keys(dice))
    if what < 4:
        first, second = (table.look_up(keys) for table in both)
        assert np.array_equal(first, second)
    elif what < 7:
        grads = dice.normal(size=(len(keys), DIM)).astype(np.float32)
        for table in both:
            table.push(keys, grads)
    elif what == 7:
        first, second = (table.look_up(keys, create=False) for table in both)
        assert np.array_equal(first, second)
    elif what == 8:
        first, second = (table.erase(keys[:3]) for table in both)
        assert first == second
        return set(keys[:3].tolist())
    else:
        both[1].settle()
    assert both[0].num_rows == both[1].num_rows
    return set()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seed", range(3))
def test_random_requests_have_the_answers_of_a_table_in_memory(seed: int, tmp_path: Path):
    dice, both = np.random.default_rng(seed), pair(tmp_path)
    for _ in range(400):
        step(dice, both)
    assert rows_of(both[0]) == rows_of(both[1])
    stats = both[1].stats()
    assert stats["hot_rows"] + stats["cold_rows"] == stats["rows"] == both[0].num_rows
    assert stats["hot_rows"] <= 700
    assert stats["rows_read"] > 2000


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seed", first_of(range(3)))
def test_a_row_that_exists_throughout_a_pass_comes_once(seed: int, tmp_path: Path):
    dice, both = np.random.default_rng(seed), pair(tmp_path)
    for _ in range(200):
        step(dice, both)
    passes: list[tuple[Any, set[int], list[int], set[int]]] = []
    num_done = 0
    for _ in range(300):
        if len(passes) < 3:
            passes.append((both[1].chunks(50), set(rows_of(both[0])), [], set()))
        erased = step(dice, both)
        for one in list(passes):
            one[3].update(erased)
            slice_ = next(one[0], None) if dice.random() < 0.5 else ()
            if slice_ is None:
                met = [key for key in one[2] if key not in one[3]]
                assert len(met) == len(set(met))
                assert one[1] - one[3] <= set(met)
                passes.remove(one)
                num_done += 1
            elif slice_:
                one[2].extend(slice_[0].tolist())
    assert num_done > 2


@pytest.mark.usefixtures("tiny")
def test_full_and_delta_saves_restore_the_table(tmp_path: Path):
    dice, both = np.random.default_rng(5), pair(tmp_path)
    restored = pair(tmp_path)[1]
    for mode in ("full", "delta", "delta"):
        for _ in range(150):
            step(dice, both)
        both[1].begin_save(is_committed=True)
        num_rows = 0
        for saved in both[1].save_slices(mode, 300):  # type: ignore[arg-type]
            restored.restore(OneSlice(saved))
            num_rows += len(saved.arrays["keys"]) if saved.kind == "rows" else 0
        assert rows_of(restored) == rows_of(both[0])
        assert mode == "full" or num_rows < both[0].num_rows


@pytest.mark.usefixtures("tiny")
def test_statistics_and_admission_are_those_of_a_table_in_memory(tmp_path: Path):
    entry, shrink = AdmissionEntry(count=2), Shrink(delete_after_unseen_days=1.0)
    dice, both = np.random.default_rng(6), pair(tmp_path, msgspec.structs.replace(PLAIN, entry=entry, shrink=shrink))
    for number in range(300):
        for table in both:
            table.clock.set(1_700_000_000 + 600 * number)
        step(dice, both)
        if number % 100 == 99:
            first, second = (list(table.shrink(shrink))[-1] for table in both)
            assert first == second
    assert rows_of(both[0]) == rows_of(both[1])


@pytest.mark.usefixtures("tiny")
def test_a_walk_gives_every_row_once(tmp_path: Path):
    dice, both = np.random.default_rng(7), pair(tmp_path)
    for _ in range(200):
        step(dice, both)
    met, cursor = {}, 0
    while True:
        keys, values, cursor = both[1].walk(cursor, 37)
        for key, row in zip(keys.tolist(), values, strict=True):
            assert key not in met
            met[key] = row.tobytes()
        if not cursor:
            break
    assert met == {key: row[: 4 * DIM] for key, row in rows_of(both[0]).items()}


@pytest.mark.usefixtures("tiny")
def test_state_alone_is_taken_and_given_by_rows_on_disk_too(tmp_path: Path):
    dice, both = np.random.default_rng(7), pair(tmp_path)
    for _ in range(200):
        step(dice, both)
    before = rows_of(both[0])
    keys = np.array([*before, 2**60], np.uint64)  # the last one has no row
    states = dice.random((len(keys), both[0].num_words - DIM), np.float32)
    for table in both:
        table.check_assign_state(keys, states)
        table.assign_state(keys, states)
        with pytest.raises(TableError):
            table.check_assign_state(keys, states[:, :-1])
        with pytest.raises(TableError):
            table.check_assign_state(keys, np.full_like(states, np.nan))
    after = {key: before[key][: 4 * DIM] + row.tobytes() for key, row in zip(before, states, strict=False)}
    assert rows_of(both[1]) == rows_of(both[0]) == after
    met, cursor = {}, 0
    while True:
        some, rows, cursor = both[1].walk_rows(cursor, 37)
        met.update({key: row.tobytes() for key, row in zip(some.tolist(), rows, strict=True)})
        if not cursor:
            break
    assert met == after


@pytest.mark.usefixtures("tiny")
def test_more_rows_than_memory_holds_are_loaded_onto_the_disk(tmp_path: Path):
    both = pair(tmp_path)
    keys = np.arange(1, 20_001, dtype=np.uint64)
    values = np.random.default_rng(8).random((20_000, 2 * DIM), np.float32)
    for table in both:
        table.load(keys, values)
    assert both[1].stats()["hot_rows"] <= 700
    assert rows_of(both[0]) == rows_of(both[1])


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_stops_new_rows_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows in memory are trained on, rows on disk are read; freed space is used at once."""
    dice, both = np.random.default_rng(10), pair(tmp_path)
    for _ in range(100):
        step(dice, both)
    is_full, allocate = [True], cold_rows.allocate

    def refuse(*arguments: int) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "full")
        allocate(*arguments)

    monkeypatch.setattr(cold_rows, "allocate", refuse)
    fresh = np.arange(1 << 40, (1 << 40) + 100_000, dtype=np.uint64).reshape(-1, 400)
    errors = []
    for keys in fresh:
        try:
            both[1].look_up(keys)
        except TableError as error:
            errors.append(str(error))
            if len(errors) == 3:
                break
        else:
            both[0].look_up(keys)
    assert [str(tmp_path) in error for error in errors] == [True] * 3
    assert rows_of(both[0]) == rows_of(both[1])
    known = fresh[0][:100]
    assert np.array_equal(*(table.look_up(known, create=False) for table in both))
    hot = both[1].index.keys_of(np.arange(both[1].index.num_row_numbers))[:20].copy()
    hot = hot[both[1].find(hot) >= 0]
    is_full[0] = False
    for table in both:
        table.push(hot, np.ones((len(hot), DIM), np.float32))
        table.look_up(fresh[-1])
    assert rows_of(both[0]) == rows_of(both[1])


@pytest.mark.usefixtures("tiny")
def test_a_segment_that_a_write_frees_is_not_compacted(tmp_path: Path):
    """Its rows have moved, and its last write ends while room is made for the rows of one of its blocks."""
    table = pair(tmp_path)[1]
    cold = table.tiers.cold
    end_writes = cold._disk.end_writes
    cold._disk.end_writes = lambda fewest: []  # type: ignore[method-assign]
    keys = np.arange(1, cold.per_segment + 301, dtype=np.uint64)
    table.tiers.add_cold(keys, np.zeros((len(keys), 2 * DIM), np.uint32))
    for start in range(0, cold.per_segment, 400):
        table.look_up(keys[start : start + 400])
    assert cold.live[0] == 0
    assert cold.has(0)
    cold._disk.end_writes = lambda fewest: end_writes(1 << 20)  # type: ignore[method-assign]
    table.tiers.compaction._left = iter([0])
    assert table.tiers.compaction.compact()
    assert not cold.has(0)


def test_tables_that_share_a_folder_have_files_of_their_own(tmp_path: Path):
    keys = np.arange(1, 2001, dtype=np.uint64)
    tables = [pair(tmp_path)[1] for _ in range(2)]
    for number, table in enumerate(tables):
        table.tiers.add_cold(keys, np.full((len(keys), 2 * DIM), number, np.float32).view(np.uint32))
    for number, table in enumerate(tables):
        assert np.all(table.look_up(keys, create=False) == number)
    assert not list(tmp_path.iterdir())
    del tables, table
    left = pair(tmp_path)[1]  # a later table finds nothing of them
    assert not left.look_up(keys, create=False).any()
    assert left.num_rows == 0


@pytest.mark.usefixtures("tiny")
def test_one_request_for_more_rows_than_memory_holds_is_an_error(tmp_path: Path):
    table = pair(tmp_path)[1]
    with pytest.raises(TableError, match="'t'"):
        table.look_up(np.arange(1, 6000, dtype=np.uint64))
    assert table.num_rows == 0


@pytest.mark.usefixtures("tiny")
def test_ticks_start_again_before_they_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hot_rows, "MAX_TICK", 64)
    dice, both = np.random.default_rng(9), pair(tmp_path)
    for _ in range(400):
        step(dice, both)
    assert rows_of(both[0]) == rows_of(both[1])


@pytest.mark.parametrize(
    "shrink", [Shrink(max_rows=100), Shrink(where="delta < 1 and unseen_days > 1")], ids=["max_rows", "delta"]
)
def test_policies_that_need_all_rows_in_memory_are_refused(shrink: Shrink, tmp_path: Path):
    entry = AdmissionEntry(show="show", click="click")
    with pytest.raises(TableError, match="'t'"):
        pair(tmp_path, msgspec.structs.replace(PLAIN, shrink=shrink, entry=entry))


def test_memory_that_holds_hardly_a_row_is_refused(tmp_path: Path):
    with pytest.raises(TableError, match="'t'"):
        pair(tmp_path, msgspec.structs.replace(PLAIN, dim=1 << 14))


def full_pair(folder: Path, num_free: int) -> tuple[tuple[SparseTable, TieredTable], np.ndarray]:
    """Tables with the same 2,000 rows, most of them on disk, and room for `num_free` more in the directory."""
    both = pair(folder, msgspec.structs.replace(PLAIN, shrink=Shrink(delete_after_unseen_days=1.0)))
    keys = np.arange(1, 2001, dtype=np.uint64)
    for table in both:
        table.clock.set(1_700_000_000)
        table.load(keys, np.random.default_rng(11).random((len(keys), 2 * DIM), np.float32))
    directory = both[1].tiers.directory
    directory.max_keys = directory.num_keys + num_free
    return both, keys


@pytest.mark.usefixtures("tiny")
def test_a_full_table_serves_the_keys_that_have_rows(tmp_path: Path):
    both, keys = full_pair(tmp_path, num_free=3)
    some, fresh = keys[::5], np.arange(10_001, 10_004, dtype=np.uint64)
    for batch in (np.tile(some, 2), np.concatenate([some, fresh, fresh])):
        assert np.array_equal(*(table.look_up(batch) for table in both))
        for table in both:
            table.push(batch, np.ones((len(batch), DIM), np.float32))
            table.check_add(batch, np.ones((len(batch), DIM), np.float32))
            table.assign(batch, np.ones((len(batch), DIM), np.float32))
    with pytest.raises(TableError, match=naming("'t'", "2,003", 1)):
        both[1].look_up(np.append(some, np.uint64(20_000)))
    assert rows_of(both[0]) == rows_of(both[1])


@pytest.mark.usefixtures("tiny")
def test_a_pull_that_creates_no_rows_needs_no_room(tmp_path: Path):
    both = full_pair(tmp_path, num_free=0)[0]
    keys = np.arange(1, 4001, dtype=np.uint64)
    hot = both[1].index.num_keys
    for table in both:
        table.check_pull(keys, False)
    assert np.array_equal(*(table.pull(keys, create=False) for table in both))
    assert np.array_equal(*(table.pull_rows(keys, create=False) for table in both))
    assert both[1].index.num_keys == hot


@pytest.mark.usefixtures("tiny")
def test_a_full_table_drops_rows(tmp_path: Path):
    both, keys = full_pair(tmp_path, num_free=0)
    for table in both:
        table.check_erase(keys[:1500])
    assert [table.erase(keys[:10]) for table in both] == [10, 10]
    for table in both:
        table.clock.set(1_700_000_000 + 100_000)
        table.look_up(keys[10:100])
    shrink = Shrink(delete_after_unseen_days=1.0, max_share=1.0)
    assert [sum(table.shrink(shrink)) for table in both] == [1900, 1900]
    assert rows_of(both[0]) == rows_of(both[1])


def test_a_shrink_and_a_look_at_rows_leave_rows_on_disk(tmp_path: Path, tiny: None) -> None:
    """A shrink reads them twice, since it counts first, and brings only those into memory that it drops."""
    spec = msgspec.structs.replace(PLAIN, shrink=Shrink(delete_after_unseen_days=1))
    plain, tiered = pair(tmp_path, spec)
    keys = np.arange(3000, dtype=np.uint64)
    for table in (plain, tiered):
        for start in range(0, 3000, 100):
            table.clock.set(1_000_000 if start < 300 else 2_000_000)
            table.look_up(keys[start : start + 100])
    before = tiered.tiers.num_read
    there, values = tiered.present(keys)
    assert there.all()
    assert np.array_equal(values, plain.present(keys)[1])
    cold = tiered.tiers.cold.num_live
    assert 2000 < cold <= 3000
    moved = tiered.tiers.num_read - before
    assert [sum(table.shrink(spec.shrink)) for table in (plain, tiered)] == [300, 300]
    assert tiered.tiers.num_read - before - moved <= 600
    assert rows_of(plain) == rows_of(tiered)
