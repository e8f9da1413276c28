"""Tables whose values are stored in fewer bits: requests, saves, tiers, replay; and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support import logged_work

from torchfleet.base.errors import TableError
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.tables import tiered_table
from torchfleet.ps.tables.kinds import make_table
from torchfleet.ps.tables.rows.keymap import KeyMap
from torchfleet.ps.tables.rows.packed_map import PackedMap
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.table import OneSlice
from torchfleet.ps.tables.tiers import tiers

BYTES = 1 << 26
FORMATS = [RowFormat("bfloat16"), RowFormat("float16"), RowFormat("int8"), RowFormat("int8", "learned")]
IDS = [f"{row_format.dtype} {row_format.step}" for row_format in FORMATS]
WORDS = {"bfloat16": 8, "float16": 8, "int8": 5}  # of 16 values
ADAGRAD = Rule("rowwise_adagrad", lr=0.1)
all_formats = pytest.mark.parametrize("row_format", FORMATS, ids=IDS)


def spec_of(row_format: RowFormat, dim: int = 16, rule: Rule = ADAGRAD, **fields: Any) -> TableSpec:
    return TableSpec(
        "t", dim=dim, rule=rule, initializer=Initializer("uniform", -0.1, 0.1), format=row_format, **fields
    )


def work_on(table: Any, seed: int = 0, num: int = 30, num_keys: int = 300) -> None:
    dice = np.random.default_rng(seed)
    for _ in range(num):
        keys = np.unique(dice.integers(0, num_keys, 60).astype(np.uint64))
        table.look_up(keys)
        table.push(keys, dice.normal(size=(len(keys), table.spec.dim)).astype(np.float32))


def rows_of(table: Any) -> dict[int, bytes]:
    """All rows as they are stored."""
    return {
        key: stored[i].tobytes() for keys, stored, _ in table.stored_chunks() for i, key in enumerate(keys.tolist())
    }


def states_of(table: Any) -> dict[int, bytes]:
    dim = table.spec.dim
    return {key: wide[i, dim:].tobytes() for keys, wide, _ in table.chunks() for i, key in enumerate(keys.tolist())}


def steps_of(table: Any, keys: Any) -> Any:
    """The steps of int8 rows, which are their first words."""
    known = {key: stored[i, 0] for there, stored, _ in table.stored_chunks() for i, key in enumerate(there.tolist())}
    return np.array([known[key] for key in keys.tolist()], np.float32)


@all_formats
def test_a_row_takes_the_bytes_of_its_type(row_format: RowFormat) -> None:
    table = SparseTable(spec_of(row_format), BYTES)
    assert isinstance(table.index, PackedMap)
    assert table.index.width == 2 + WORDS[row_format.dtype] + 1
    wide = SparseTable(spec_of(row_format, dim=33, rule=Rule("adam")), BYTES)
    assert isinstance(wide.index, KeyMap)
    assert wide.index.width == 2 + {2: 17, 1: 10}[1 if row_format.dtype == "int8" else 2] + 66


@all_formats
@pytest.mark.parametrize(
    ("kind", "dim", "rule"),
    [("sparse", 16, ADAGRAD), ("sparse", 33, Rule("adam", lr=0.01)), ("array", 5, Rule("sgd", lr=0.5))],
)
def test_an_update_is_that_of_float32_but_for_one_rounding(
    row_format: RowFormat, kind: str, dim: int, rule: Rule
) -> None:
    """The oracle is a table of float32 with the rows before the update."""
    size = {"size": 400} if kind == "array" else {}
    spec = spec_of(row_format, dim, rule, kind=kind, **size)
    table, dice = SparseTable(spec, BYTES), np.random.default_rng(4)
    plain = msgspec.structs.replace(spec, format=RowFormat())
    for num_keys in (50, 300, 350):  # from 256 on, rows of the pull are remembered for the push
        keys = dice.permutation(400)[:num_keys].astype(np.uint64)
        table.look_up(keys)
        oracle = SparseTable(plain, BYTES)
        for there, wide, _ in table.chunks():
            oracle.load(there, wide)
        oracle.step = table.step
        grads = dice.normal(size=(num_keys, dim)).astype(np.float32)
        table.push(keys, grads)
        oracle.push(keys, grads)
        found, exact = table.look_up(keys), oracle.look_up(keys)
        steps = steps_of(table, keys)[:, None] if row_format.dtype == "int8" else np.float32(np.inf)
        allowed = {"bfloat16": np.abs(exact) / 128, "float16": np.abs(exact) / 1024 + 2.0**-24}
        if row_format.step == "learned":  # what is beyond 127 steps is cut
            exact = np.clip(exact, -127 * steps, 127 * steps)
        assert (np.abs(found - exact) <= 1.001 * allowed.get(row_format.dtype, steps)).all()
        states = [
            dict(zip(k.tolist(), w[:, dim:].tolist(), strict=True)) for t in (table, oracle) for k, w, _ in t.chunks()
        ]
        assert states[0] == states[-1]


@all_formats
def test_updates_are_repeatable_and_depend_on_the_seed(row_format: RowFormat) -> None:
    tables = [SparseTable(spec_of(row_format, seed=seed), BYTES) for seed in (0, 0, 1)]
    for table in tables:
        keys = np.arange(300, dtype=np.uint64)
        table.assign(keys, np.linspace(-1, 1, 4800, dtype=np.float32).reshape(300, 16))
        for _ in range(3):
            table.push(keys, np.full((300, 16), 0.3, np.float32))
    assert rows_of(tables[0]) == rows_of(tables[1])
    assert rows_of(tables[0]) != rows_of(tables[2])


@all_formats
def test_small_updates_are_not_lost(row_format: RowFormat) -> None:
    """A thousand updates, each a twentieth of what the type can tell: their sum is there, on average over rows."""
    table = SparseTable(spec_of(row_format, rule=Rule("sgd", lr=1.0)), BYTES)
    keys = np.arange(500, dtype=np.uint64)
    table.assign(keys, np.ones((500, 16), np.float32))
    small = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "int8": 1 / 127}[row_format.dtype] / 20
    for _ in range(1000):
        table.push(keys, np.full((500, 16), -small, np.float32))
    assert abs(table.look_up(keys).mean() - (1 + 1000 * small)) < 0.05 * 1000 * small


@all_formats
@pytest.mark.parametrize("dim", [1, 16, 33])
def test_saved_rows_come_back_bit_by_bit(row_format: RowFormat, dim: int) -> None:
    spec = spec_of(row_format, dim)
    table, copy = SparseTable(spec, BYTES), SparseTable(spec, BYTES)
    work_on(table)
    for saved in table.save_slices("full", 50):
        assert "rows" not in saved.arrays
        assert saved.arrays["row_values"].itemsize == (1 if row_format.dtype == "int8" else 2)
        copy.restore(OneSlice(saved))
    assert rows_of(copy) == rows_of(table)
    values = SparseTable(spec, BYTES)
    for saved in table.save_slices("inference", 50):
        assert "row_state" not in saved.arrays
        values.restore(OneSlice(saved))
    keys = np.arange(300, dtype=np.uint64)
    assert np.array_equal(values.look_up(keys, create=False), table.look_up(keys, create=False))


@all_formats
def test_a_delta_has_the_rows_that_changed(row_format: RowFormat) -> None:
    table, copy = (SparseTable(spec_of(row_format), BYTES) for _ in range(2))
    table.begin_save(False)
    work_on(table)
    for mode in ("full", "delta"):
        table.begin_save(True)
        num = 0
        for saved in table.save_slices(mode, 50):  # type: ignore[arg-type]
            num += len(saved.arrays["keys"]) if saved.kind == "rows" else 0
            copy.restore(OneSlice(saved))
        assert rows_of(copy) == rows_of(table)
        assert num == (table.num_rows if mode == "full" else 3)
        keys = np.arange(3, dtype=np.uint64)
        table.push(keys, np.ones((3, 16), np.float32))


@all_formats
def test_statistics_and_policies_stand_beside_narrow_values(row_format: RowFormat) -> None:
    entry = AdmissionEntry(count=2, show="s", click="c")
    shrink = Shrink(delete_after_unseen_days=1, where="norm < 0.01", max_share=1.0)
    spec = spec_of(row_format, entry=entry, shrink=shrink)
    table, copy = SparseTable(spec, BYTES), SparseTable(spec, BYTES)
    keys = np.arange(20, dtype=np.uint64)
    grads = np.concatenate([np.ones((20, 16)), np.full((20, 3), 2)], axis=1).astype(np.float32)
    assert not table.look_up(keys).any()
    for _ in range(2):
        assert table.look_up(keys).any(axis=1).all()
        table.push(keys, grads)
    table.assign(keys[:5], np.full((5, 16), 1e-4, np.float32))
    for saved in table.save_slices("copy", 7):
        copy.restore(OneSlice(saved))
    assert rows_of(copy) == rows_of(table)
    assert [columns["show"].tolist() for _, _, columns in copy.chunks()] == [[4.0] * 20]
    for _ in table.shrink(shrink):
        pass
    assert table.num_rows == 15


@all_formats
def test_rows_on_two_tiers_are_those_in_memory(
    row_format: RowFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers.Tiers, "max_hot", property(lambda _: 700))
    monkeypatch.setattr(tiered_table, "FEWEST_ROWS", 1)
    spec = spec_of(row_format)
    tiered = make_table(msgspec.structs.replace(spec, storage=TierStorage(64 << 20, str(tmp_path))), 1 << 30)
    plain = make_table(spec, BYTES)
    assert isinstance(tiered, tiered_table.TieredTable)
    for table in (plain, tiered):
        work_on(table, num=40, num_keys=3000)
    keys = np.arange(3000, dtype=np.uint64)
    assert tiered.stats()["cold_rows"] > 0
    assert np.array_equal(*(table.pull(keys[1000:1500], False, None) for table in (plain, tiered)))
    assert rows_of(tiered) == rows_of(plain)
    again = make_table(msgspec.structs.replace(spec, storage=TierStorage(64 << 20, str(tmp_path))), 1 << 30)
    for saved in tiered.save_slices("full", 300):
        again.restore(OneSlice(saved))
    assert rows_of(again) == rows_of(plain)


@all_formats
@pytest.mark.parametrize("seed", range(2))
def test_a_log_and_a_copy_beside_serving_lead_to_the_same_rows(
    row_format: RowFormat, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = list(logged_work.SPECS)
    specs[0] = TableSpec("narrow", dim=2, format=row_format)
    specs[1] = TableSpec("wide", dim=16, rule=ADAGRAD, format=row_format)
    specs[2] = msgspec.structs.replace(specs[2], format=row_format)
    specs[4] = msgspec.structs.replace(specs[4], format=row_format)
    monkeypatch.setattr(logged_work, "SPECS", specs)
    server, sink, copy = logged_work.make_server(), logged_work.MemorySink(), logged_work.MemorySink()
    handler = LoggedServer(server, [sink], clock=lambda: 0.0)
    handler.copy_to(sink.append, lambda: True)
    while handler.is_copying:
        handler.work()
    work = logged_work.Work(handler, seed)
    handler._clock = lambda: work.now
    work.steps(60)
    handler.copy_to(copy.append, lambda: work.dice.random() < 0.2)
    handler.add_sink(copy)
    while handler.is_copying:
        work.steps(5)
    work.steps(30)
    for entries in (sink.entries, copy.entries):
        replay = Replay(logged_work.make_server())
        for frames in entries:
            replay.apply(decode_entry(frames))
        replay.finish()
        assert logged_work.whole_state(replay.server, False) == logged_work.whole_state(server, False)
        for number in (specs[i].number for i in (0, 1, 2, 4)):
            live = rows_of(server.state.table(number))
            found = rows_of(replay.server.state.table(number))  # without rows that were looked up and never changed
            assert found.items() <= live.items()
            assert len(found) > 50 or number == specs[2].number


def test_a_slice_that_no_table_has_is_refused() -> None:
    spec = spec_of(RowFormat("float16"), dim=2, rule=Rule("sgd"))
    table = SparseTable(spec, BYTES)
    table.look_up(np.arange(3, dtype=np.uint64))
    saved = next(iter(table.save_slices("full", 10)))
    with pytest.raises(TableError):
        SparseTable(msgspec.structs.replace(spec, format=RowFormat()), BYTES).load_slice(saved)
    for bad in (np.float16("nan"), np.float16("inf")):
        saved.arrays["row_values"] = np.full((3, 2), bad, np.float16)
        with pytest.raises(TableError):
            table.load_slice(saved)
    learned = SparseTable(spec_of(RowFormat("int8", "learned"), dim=2), BYTES)
    learned.look_up(np.arange(3, dtype=np.uint64))
    saved = next(iter(learned.save_slices("full", 10)))
    for step in (0.0, -1.0, np.nan, np.inf):
        saved.arrays["scale"] = np.full(3, step, np.float32)
        with pytest.raises(TableError):
            learned.load_slice(saved)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float8"},
        {"dtype": "float16", "step": "learned"},
        {"dtype": "int8", "step": "guessed"},
        {"wire": "float64"},
        {"dtype": "int8", "step": "learned", "step_rate": 2.0},
        {"dtype": "int8", "step_rate": 0.5},
    ],
)
def test_a_format_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(TableError):
        RowFormat(**fields)


def test_what_does_not_go_with_narrow_values_is_refused() -> None:
    with pytest.raises(TableError, match=r"bfloat16.*weight_bounds"):
        spec_of(RowFormat("bfloat16"), rule=Rule("sgd", low=-1.0, high=1.0))
    with pytest.raises(TableError, match="dense"):
        TableSpec("d", "dense", size=3, format=RowFormat("bfloat16"))


@all_formats
@pytest.mark.parametrize("dim", [16, 64])  # inside of the map, and beside it
@pytest.mark.parametrize("tiered", [False, True])
def test_what_followers_are_told_is_what_a_pull_returns(
    row_format: RowFormat, dim: int, tiered: bool, tmp_path: Path
) -> None:
    spec = spec_of(row_format, dim)
    if tiered:
        spec = msgspec.structs.replace(spec, storage=TierStorage(BYTES, str(tmp_path)))
    table = make_table(spec, 1 << 30)
    work_on(table)
    keys = np.arange(0, 600, 2, dtype=np.uint64)
    is_there, values = table.present(keys)
    assert values.dtype == np.float32
    assert 0 < is_there.sum() < len(keys)
    assert np.array_equal(values, table.pull(keys[is_there], False, None))
