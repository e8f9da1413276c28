"""Sparse tables: what a table answers, against a dict of numpy rows; and that what it refuses leaves no trace."""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support import twins
from support.grids import first_of
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import TableError
from torchfleet.ps.tables import rowstore, sparse_table
from torchfleet.ps.tables.eviction import shrink
from torchfleet.ps.tables.rows import keymap, packed_map, row_form
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.rowstore import CHUNK
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.shard import shard

ROOM = 1 << 20
UNIFORM = Initializer("uniform", -1.0, 1.0)
LARGEST = 2**64 - 1


def added(table, keys, deltas):
    table.check_add(keys, deltas)
    table.add(keys, deltas)


def called(table, call):
    """The method of this name, which checks what it is given."""
    return functools.partial(added, table) if call == "add" else getattr(table, call)


def make_table(max_bytes: int = ROOM, **fields) -> SparseTable:
    return SparseTable(TableSpec("t", **({"dim": 2} | fields)), max_bytes)


def make_indexed(kind: str, size: int, max_bytes: int = ROOM, **fields) -> SparseTable:
    """`sparse`: the rows of a narrow table are in its map. `wide`: they are beside it, as those of wide tables are."""
    with mock.patch.object(rowstore, "PACKED_BYTES", rowstore.PACKED_BYTES * (kind != "wide")):
        fields |= {"kind": "array", "size": size} if kind == "array" else {}
        return make_table(max_bytes, **fields)


def as_keys(*keys: int) -> np.ndarray:
    return np.array(keys, np.uint64)


def as_rows(*rows) -> np.ndarray:
    return np.array(rows, np.float32)


def contents(table: SparseTable) -> dict[int, list[float]]:
    """Value and state of every row, by key."""
    found: dict[int, list[float]] = {}
    for keys, rows, _ in table.chunks(7):
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            assert key not in found
            found[key] = row
    return found


def snapshot(table: SparseTable) -> tuple[dict[int, list[float]], dict[str, float]]:
    return contents(table), table.stats()


# Pull


def test_a_pull_from_a_range_of_ids_that_all_have_rows_does_not_look_for_room():
    table = make_table(kind="array", size=100)
    table.assign(np.arange(100, dtype=np.uint64), np.ones((100, 2), np.float32))
    with mock.patch.object(SparseTable, "absent", side_effect=AssertionError("a search for keys without a row")):
        assert table.check_pull(as_keys(3, 99, 3), create=True) == 24
        assert table.pull(as_keys(3, 99, 3)).tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("kind", ["sparse", "array"])
def test_pull_creates_missing_rows_and_gives_them_again(kind):
    table = make_table(kind=kind, size=100 * (kind == "array"), initializer=UNIFORM)
    first = table.pull(as_keys(5, 6, 5))
    assert first.shape == (3, 2)
    assert first.dtype == np.float32
    assert (first[0] == first[2]).all()
    assert (first[0] != first[1]).all()
    assert table.stats()["rows"] == 2
    assert (table.pull(as_keys(6, 5, 6)) == first[[1, 0, 1]]).all()
    assert table.stats()["rows"] == 2


@pytest.mark.parametrize("kind", ["sparse", "array"])
def test_pull_without_create_reads_missing_keys_as_zeros_and_adds_no_row(kind):
    table = make_table(kind=kind, size=100 * (kind == "array"), initializer=Initializer("constant", 3.0))
    table.pull(as_keys(1))
    assert table.pull(as_keys(0, 1, 2), create=False).tolist() == [[0, 0], [3, 3], [0, 0]]
    assert table.stats()["rows"] == 1


def test_pull_gives_an_array_of_its_own():
    table = make_table()
    table.pull(as_keys(1))[:] = 9
    assert table.pull(as_keys(1)).tolist() == [[0, 0]]


def test_a_batch_longer_than_a_chunk_is_served_whole():
    table = make_table(initializer=UNIFORM, seed=3)
    keys = np.random.default_rng(0).integers(0, 3 * CHUNK, 4 * CHUNK + 5, dtype=np.uint64)
    expected = {
        key: twins.first_value(int(table.form.stream), key, 2, "uniform", -1.0, 1.0) for key in set(keys.tolist())
    }
    wanted = np.array([expected[key] for key in keys.tolist()])
    assert twins.same_bits(table.pull(keys), wanted)
    grads = np.ones((len(keys), 2), np.float32)
    table.push(keys, grads, lr=1.0)
    counts = dict(zip(*(array.tolist() for array in np.unique(keys, return_counts=True)), strict=True))
    wanted -= np.array([[counts[key]] for key in keys.tolist()], np.float32)
    assert twins.same_bits(table.pull(keys), wanted)


def test_a_batch_without_keys_is_no_error():
    table = make_table()
    none, no_grads = as_keys(), np.empty((0, 2), np.float32)
    assert table.pull(none).shape == (0, 2)
    table.push(none, no_grads)
    table.assign(none, no_grads)
    assert table.erase(none) == 0
    assert contents(table) == {}


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["sparse", "array"])
def test_the_first_value_of_a_row_is_the_same_whatever_the_number_of_servers(kind, num_servers):
    size = 500 * (kind == "array")
    spec = TableSpec("t", kind, dim=3, size=size, seed=4, initializer=Initializer("normal", 0.0, 1.0))
    keys = np.arange(500, dtype=np.uint64)
    stream = int(row_form.value_stream(4, "t"))
    expected = np.array([twins.first_value(stream, key, 3, "normal", 0.0, 1.0) for key in range(500)])
    parts = shard(spec, keys, num_servers)
    rows = []
    for server, own in enumerate(parts.keys):
        part = TableSpec("t", kind, 3, size, spec.rule, spec.initializer, 4, server, num_servers)
        rows.append(SparseTable(part, ROOM).pull(own))
    assert twins.same_bits(parts.join_rows(rows), expected)


# Push


def test_push_sums_the_gradients_of_a_key_and_applies_the_rule_once():
    """Adagrad shows the difference: of 3 + 4 it makes 49 and one step, of 3 and then 4 it would make 25 and two."""
    table = make_table(dim=1, rule=Rule("adagrad", lr=0.5))
    table.push(as_keys(8, 9, 8), as_rows([3], [1], [4]))
    assert contents(table) == {8: [-0.5, 49.0], 9: [-0.5, 1.0]}
    assert table.step == 1


def test_push_creates_missing_rows_with_their_first_value():
    table = make_table(initializer=Initializer("constant", 10.0), rule=Rule("sgd", lr=1.0))
    table.push(as_keys(1, LARGEST), as_rows([1, 2], [3, 4]))
    assert contents(table) == {1: [9, 8], LARGEST: [7, 6]}


def test_state_starts_at_the_initial_accumulator_of_adagrad():
    table = make_table(rule=Rule("adagrad", initial_accumulator=0.25))
    table.pull(as_keys(1))
    assert contents(table) == {1: [0, 0, 0.25, 0.25]}


def test_every_push_is_a_step_and_pulls_are_not():
    table = make_table(dim=1, rule=Rule("adam", lr=0.1))
    for step in range(1, 4):
        table.push(as_keys(step), as_rows([1.0]))
        table.pull(as_keys(1, 2, 3))
        table.assign(as_keys(77), as_rows([1.0]))
        assert table.step == table.stats()["step"] == step
    # Key 3 had its first gradient at step 3: the correction of Adam's averages is that of the table's step.
    store = np.zeros((1, 3), np.float32)
    twins.row_adam(store, 0, np.array([0]), as_rows([1.0]), 0.1, 0.9, 0.999, 1e-10, 3)
    assert contents(table)[3] == store[0].tolist()


def test_the_rate_of_a_push_goes_before_the_tables_own():
    table = make_table(dim=1, rule=Rule("sgd", lr=1.0))
    table.push(as_keys(1), as_rows([1.0]), lr=0.25)
    table.push(as_keys(1), as_rows([1.0]), lr=0.0)
    assert table.pull(as_keys(1)).tolist() == [[-0.25]]
    table.push(as_keys(1), as_rows([1.0]))
    assert table.pull(as_keys(1)).tolist() == [[-1.25]]


@pytest.mark.parametrize("lr_decay", [0.0, 0.5])
def test_the_rate_of_adagrad_falls_with_the_steps_of_the_table(lr_decay):
    table = make_table(dim=1, rule=Rule("adagrad", lr=1.0, lr_decay=lr_decay, eps=1e-30))
    for step in range(3):
        table.push(as_keys(step), as_rows([1.0]))
    rates = [-1 / (1 + step * lr_decay) for step in range(3)]
    assert table.pull(as_keys(0, 1, 2)).reshape(-1).tolist() == pytest.approx(rates, rel=1e-7)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_bounds_hold_after_an_update(name):
    table = make_table(dim=1, rule=Rule(name, lr=5.0, low=-0.5, high=1.0))
    table.push(as_keys(1, 2), as_rows([1.0], [-1.0]))
    assert table.pull(as_keys(1, 2)).tolist() == [[-0.5], [1.0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_arrays_over_a_messages_memory_are_taken_and_not_written_to(name):
    keys, grads = as_keys(1, 2, 1), as_rows([1, 2], [3, 4], [5, 6])
    keys.flags.writeable = grads.flags.writeable = False
    table = make_table(rule=Rule(name, lr=1.0))
    table.pull(keys)
    table.push(keys, grads)
    table.push(keys[:2], grads[:2])
    table.assign(keys[:1], grads[:1])
    assert table.pull(as_keys(1)).tolist() == [[1, 2]]
    assert table.erase(keys) == 2


def test_add_moves_values_by_the_sum_of_differences_and_no_rule_is_applied():
    table = make_table(dim=1, rule=Rule("adagrad"), initializer=Initializer("constant", 10.0))
    added(table, as_keys(1, 2, 1), as_rows([3], [-1], [4]))
    assert contents(table) == {1: [17, 0], 2: [9, 0]}
    assert table.step == 1


def test_differences_are_checked_once_and_raise_the_bounds_once():
    """After a thousand pushes of differences the bound is that of their sum."""
    table = make_table(dim=1, initializer=Initializer("constant", 0.0))
    for _ in range(1000):
        added(table, as_keys(1), as_rows([1]))
    assert contents(table)[1][0] == 1000
    assert table.bounds._held[0] <= 2001


def test_absent_gives_the_keys_without_a_row():
    table = make_table()
    keys = np.arange(3 * CHUNK, dtype=np.uint64)
    table.pull(keys[::2].copy())
    assert table.absent(keys).tolist() == keys[1::2].tolist()
    assert table.absent(as_keys()).tolist() == []
    assert table.absent(as_keys(LARGEST, 0, LARGEST)).tolist() == [LARGEST, LARGEST]


# Assign


def test_assign_sets_values_and_leaves_the_state():
    table = make_table(dim=1, rule=Rule("adagrad"))
    table.push(as_keys(1), as_rows([3]))
    table.assign(as_keys(1, 2), as_rows([7], [8]))
    assert contents(table) == {1: [7, 9], 2: [8, 0]}
    assert table.step == 1


def test_assign_sets_values_and_state_when_rows_are_that_wide():
    table = make_table(rule=Rule("adam"))
    table.assign(as_keys(1, 2), as_rows(range(6), range(6, 12)))
    assert contents(table) == {1: [0, 1, 2, 3, 4, 5], 2: [6, 7, 8, 9, 10, 11]}
    assert table.pull(as_keys(2)).tolist() == [[6, 7]]


def test_of_equal_keys_the_last_assignment_stands():
    table = make_table(dim=1)
    keys = np.zeros(CHUNK + 10, np.uint64)
    table.assign(keys, np.arange(CHUNK + 10, dtype=np.float32).reshape(-1, 1))
    assert contents(table) == {0: [CHUNK + 9]}


def test_a_table_filled_from_the_chunks_of_another_goes_on_like_it():
    rng = np.random.default_rng(0)
    one = make_table(rule=Rule("adam"), initializer=UNIFORM)
    other = make_table(rule=Rule("adam"), initializer=UNIFORM)
    for _ in range(5):
        one.push(rng.integers(0, 200, 90, dtype=np.uint64), rng.standard_normal((90, 2), np.float32))
    one.erase(np.arange(0, 200, 3, dtype=np.uint64))
    for keys, rows, _ in one.chunks(13):
        other.assign(keys, rows)
    other.step = one.step
    assert contents(one) == contents(other)
    keys, grads = rng.integers(0, 300, 90, dtype=np.uint64), rng.standard_normal((90, 2), np.float32)
    one.push(keys, grads)
    other.push(keys, grads)
    assert contents(one) == contents(other)


def test_rows_that_accepted_pushes_have_made_can_always_be_assigned_back():
    """The square of a gradient of 1e20 is not finite in float32: refused. What is taken, up to there, loads again."""
    table = make_table(dim=1, rule=Rule("adagrad"))
    table.push(as_keys(1), as_rows([1e19]))
    with pytest.raises(TableError, match="NaN"):
        table.push(as_keys(1), as_rows([1e20]))
    restored = make_table(dim=1, rule=Rule("adagrad"))
    for keys, rows, _ in table.chunks():
        restored.assign(keys, rows)
    assert contents(restored) == contents(table)


# Erase


@pytest.mark.parametrize("kind", ["sparse", "array"])
def test_an_erased_row_begins_again_with_its_first_value_and_state(kind):
    size = 100 * (kind == "array")
    table = make_table(kind=kind, size=size, rule=Rule("adagrad", initial_accumulator=0.5), initializer=UNIFORM)
    first = table.pull(as_keys(1, 2, 3))
    before = contents(table)
    table.push(as_keys(1, 2, 3), np.ones((3, 2), np.float32))
    assert table.erase(as_keys(1, 3, 1, 50)) == 2
    assert table.stats()["rows"] == 1
    assert table.pull(as_keys(1, 3), create=False).tolist() == [[0, 0], [0, 0]]
    assert twins.same_bits(table.pull(as_keys(3, 1)), first[[2, 0]])
    assert {key: row for key, row in contents(table).items() if key != 2} == {1: before[1], 3: before[3]}


def test_memory_of_erased_rows_is_used_again():
    table = make_table()
    table.pull(np.arange(1000, dtype=np.uint64))
    before = table.stats()["bytes"]
    for start in range(1000, 20_000, 1000):
        assert table.erase(np.arange(start - 1000, start, dtype=np.uint64)) == 1000
        table.pull(np.arange(start, start + 1000, dtype=np.uint64))
    assert table.stats()["bytes"] == before


# Chunks


@pytest.mark.parametrize("kind", ["sparse", "array"])
@pytest.mark.parametrize("num_rows", [1, 10, 1 << 16])
def test_chunks_give_every_row_once(kind, num_rows):
    table = make_table(kind=kind, size=1000 * (kind == "array"), initializer=UNIFORM)
    keys = np.random.default_rng(0).permutation(1000)[:300].astype(np.uint64)
    values = dict(zip(keys.tolist(), table.pull(keys).tolist(), strict=True))
    table.erase(keys[:100])
    pieces = list(table.chunks(num_rows))
    assert max(len(piece) for piece, _, _ in pieces) <= num_rows
    found = [pair for keys, rows, _ in pieces for pair in zip(keys.tolist(), rows.tolist(), strict=True)]
    assert sorted(found) == sorted((key, values[key]) for key in keys[100:].tolist())


@pytest.mark.parametrize("kind", ["sparse", "wide", "array"])
@pytest.mark.parametrize("seed", first_of(range(5)))
def test_a_row_that_lives_through_a_walk_in_chunks_comes_exactly_once(kind, seed):
    """Between two pieces rows are updated, added and erased; value and state of a piece belong together."""
    rng = np.random.default_rng(seed)
    table = make_indexed(kind, 10_000, dim=1, rule=Rule("adagrad", lr=1.0, eps=1e-30))
    table.push(np.arange(2000, dtype=np.uint64), np.ones((2000, 1), np.float32))
    lives = set(range(2000))
    seen: list[int] = []
    with mock.patch.object(keymap, "SMALL", 1), mock.patch.object(packed_map, "SMALL", 1):
        for keys, rows, _ in table.chunks(100):
            seen += keys.tolist()
            # All gradients are 1, so after n updates the state is n and the value -(1 + 1/√2 + ... + 1/√n).
            sums = {n: -sum(1 / math.sqrt(i) for i in range(1, n + 1)) for n in set(rows[:, 1].astype(int).tolist())}
            assert rows[:, 0].tolist() == pytest.approx([sums[int(n)] for n in rows[:, 1]], rel=1e-6)
            gone = rng.integers(0, 5000, 40, dtype=np.uint64)
            table.erase(gone)
            lives -= set(gone.tolist())
            some = np.append(rng.integers(0, 10_000, 100, dtype=np.uint64), np.array(sorted(lives)[:50], np.uint64))
            table.push(np.unique(some), np.ones((len(np.unique(some)), 1), np.float32))
    for key in lives:
        assert seen.count(key) == 1


# Stats


def test_stats_count_rows_bytes_steps_and_load():
    table = make_table(dim=8, rule=Rule("adagrad"))
    empty = table.stats()
    assert (empty["rows"], empty["step"], empty["load_factor"]) == (0, 0, 0)
    table.push(np.arange(100, dtype=np.uint64), np.ones((100, 8), np.float32))
    stats = table.stats()
    assert (stats["rows"], stats["step"]) == (100, 1)
    assert stats["bytes"] - empty["bytes"] == 100 * 4 * (2 + 16)
    assert 0 < stats["load_factor"] <= keymap.MAX_LOAD


def test_an_array_table_counts_the_bytes_of_its_rows_without_keys():
    table = make_table(kind="array", size=1000, dim=8, rule=Rule("adagrad"))
    empty = table.stats()
    table.pull(np.arange(100, dtype=np.uint64))
    stats = table.stats()
    assert stats["bytes"] - empty["bytes"] == 100 * 4 * 16
    assert stats["load_factor"] == 0.1


# Ids of a declared number


def test_an_array_table_holds_every_id_below_its_size_and_no_other():
    table = make_table(kind="array", size=10)
    assert len(table.pull(np.arange(10, dtype=np.uint64))) == 10
    before = snapshot(table)
    for bad in (10, LARGEST):
        for act in (
            table.look_up,
            lambda keys: table.look_up(keys, create=False),
            lambda keys: table.push(keys, np.ones((2, 2), np.float32)),
            lambda keys: table.assign(keys, np.ones((2, 2), np.float32)),
            table.erase,
        ):
            given = int(np.uint64(bad).astype(np.int64))  # ids are signed: the largest key is -1
            with pytest.raises(TableError, match=naming("'t'", 0, 9, given)):
                act(as_keys(3, bad))
    assert snapshot(table) == before


def test_ids_of_another_servers_part_are_refused():
    table = make_table(kind="array", size=10, shard=1, num_shards=3)
    table.pull(as_keys(1, 4, 7))
    before = snapshot(table)
    with pytest.raises(TableError, match=naming(1, 3)):
        table.look_up(as_keys(1, 2))
    assert snapshot(table) == before
    assert sorted(before[0]) == [1, 4, 7]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 20])
def test_the_shards_of_an_array_table_hold_all_ids_together(num_shards):
    held = 0
    for number in range(num_shards):
        table = make_table(kind="array", size=10, shard=number, num_shards=num_shards)
        ids = np.arange(number, 10, num_shards, dtype=np.uint64)
        table.assign(ids, np.repeat(ids.astype(np.float32), 2).reshape(-1, 2))
        assert contents(table) == {key: [key, key] for key in ids.tolist()}
        held += table.stats()["rows"]
    assert held == 10


def test_an_array_table_that_does_not_fit_is_refused_at_once():
    with pytest.raises(TableError, match=naming("1,000", 8, "max_table_bytes", "7,999")):
        make_table(7999, kind="array", size=1000)
    make_table(8000, kind="array", size=1000)


# What is refused leaves no trace


def full_table() -> SparseTable:
    """Room for ten rows of 16 bytes, six of them taken."""
    table = make_table(160)
    table.assign(np.arange(6, dtype=np.uint64), np.arange(12, dtype=np.float32).reshape(6, 2))
    return table


FIVE_NEW = as_keys(0, 10, 11, 12, 13, 14, 10)


@pytest.mark.parametrize(
    "act",
    [
        lambda table: table.pull(FIVE_NEW),
        lambda table: table.push(FIVE_NEW, np.ones((7, 2), np.float32)),
        lambda table: added(table, FIVE_NEW, np.ones((7, 2), np.float32)),
        lambda table: table.assign(FIVE_NEW, np.ones((7, 2), np.float32)),
    ],
    ids=["pull", "push", "add", "assign"],
)
def test_a_full_table_refuses_a_batch_whole_and_says_what_to_do(act):
    table = full_table()
    before = snapshot(table)
    with pytest.raises(TableError, match=naming("'t'", 6, 5, 4, "max_table_bytes")):
        act(table)
    assert snapshot(table) == before


def test_a_nearly_full_table_takes_a_long_batch_that_repeats_what_fits():
    table = full_table()
    keys = np.tile(as_keys(0, 1, 10, 11, 12, 13), CHUNK)
    table.push(keys, np.zeros((len(keys), 2), np.float32))
    assert table.stats()["rows"] == 10
    assert table.pull(as_keys(99), create=False).tolist() == [[0, 0]]
    with pytest.raises(TableError, match=naming(1, 0)):
        table.pull(as_keys(99))


def test_a_full_table_has_room_again_after_an_erase():
    table = full_table()
    assert table.erase(as_keys(0)) == 1
    table.pull(as_keys(10, 11, 12, 13, 14))
    assert table.stats()["rows"] == 10


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("call", ["push", "add", "assign"])
def test_a_batch_with_nan_or_infinity_is_refused_whole_and_the_key_is_named(call, bad):
    table = full_table()
    before = snapshot(table)
    block = np.ones((3, 2), np.float32)
    block[1, 1] = bad
    with pytest.raises(TableError, match=naming("'t'", "NaN", 42, 1, 3)):
        called(table, call)(as_keys(0, 42, 1), block)
    assert snapshot(table) == before


@pytest.mark.parametrize("shape", [(3, 1), (3, 3), (2, 2), (4, 2), (6,), (3, 2, 1), (0, 2)])
@pytest.mark.parametrize("call", ["push", "add", "assign"])
def test_a_block_of_the_wrong_shape_is_refused_and_both_shapes_are_named(call, shape):
    table = full_table()
    before = snapshot(table)
    with pytest.raises(TableError) as caught:
        called(table, call)(as_keys(0, 42, 1), np.ones(shape, np.float32))
    assert "(3, 2)" in str(caught.value)
    assert str(shape) in str(caught.value)
    assert snapshot(table) == before


def test_push_takes_no_block_that_is_as_wide_as_value_and_state():
    table = make_table(rule=Rule("adagrad"))
    with pytest.raises(TableError, match=naming("(1, 2)")):
        table.push(as_keys(1), np.ones((1, 4), np.float32))
    assert contents(table) == {}


# 1e39 is a finite Python float, but infinity in float32
@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0, -1e-9, 1e39])
def test_a_push_at_an_unusable_rate_is_refused(lr):
    table = full_table()
    before = snapshot(table)
    with pytest.raises(TableError, match="learning rate"):
        table.push(as_keys(0, 42), np.ones((2, 2), np.float32), lr=lr)
    assert snapshot(table) == before


@pytest.mark.parametrize("call", ["pull", "push", "add", "assign"])
def test_a_table_that_cannot_get_memory_for_more_slots_refuses_the_batch_whole(call):
    """The map of a long batch grows in its middle, and the address space may be used up by then (`ulimit -v`)."""
    table = make_indexed("wide", 0, dim=1, rule=Rule("sgd", lr=1.0))
    table.pull(np.arange(10, dtype=np.uint64))
    before = contents(table), table.step
    keys, grads = np.arange(3 * CHUNK, dtype=np.uint64), np.ones((3 * CHUNK, 1), np.float32)
    num_growths = 0

    def reserve(num_bytes: int) -> Memory:
        nonlocal num_growths
        num_growths += num_bytes > 0
        if num_growths == 2:
            raise TableError("cannot reserve address space for a table")
        return Memory(num_bytes)

    with mock.patch.object(keymap, "Memory", reserve):
        try:
            called(table, call)(keys, *([] if call == "pull" else [grads]))
        except TableError:
            assert (contents(table), table.step) == before


# A sequence of operations, against a dict of rows

small_keys = st.integers(0, 40)
any_keys = small_keys | st.sampled_from([2**32, 2**63, LARGEST]) | st.integers(0, LARGEST)
numbers = st.floats(-8, 8, width=16)


class TableMachine(RuleBasedStateMachine):
    """A table with SGD, with and without weight decay, and the same as a dict of float32 rows. All equalities are to
    the bit.

    The map under the table begins with two buckets and grows a little at a time, slowly, so that most operations meet
    a map that is being carried over.
    """

    dim = 2
    lr = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        for module in (keymap, packed_map):
            self.patches.enter_context(mock.patch.multiple(module, FIRST_BUCKETS=2, SMALL=1))
        self.patches.enter_context(mock.patch.object(keymap, "MOVES_PER_KEY", 0))
        self.patches.enter_context(mock.patch.object(packed_map.Pace, "num_moves", return_value=0))

    def teardown(self) -> None:
        self.patches.close()

    @initialize(
        kind=st.sampled_from(["sparse", "wide", "array"]),
        seed=st.integers(0, 2**63 - 1),
        decay=st.sampled_from([0.0, 0.2]),
        is_decoupled=st.booleans(),
    )
    def make(self, kind, seed, decay, is_decoupled) -> None:
        self.size = 41 if kind == "array" else 0
        self.added, self.factor = (0.0, 1.0 - self.lr * decay) if is_decoupled else (decay, 1.0)
        rule = Rule("sgd", lr=self.lr, weight_decay=decay, decoupled_decay=is_decoupled)
        fields = {"dim": self.dim, "rule": rule, "initializer": UNIFORM, "seed": seed}
        self.table = make_indexed(kind, self.size, **fields)
        if kind != "array":
            twins.set_secret(self.table.index, 77)  # so that hypothesis sees the same table again
        self.rows: dict[int, np.ndarray] = {}
        self.step = 0

    def keys(self, drawn) -> np.ndarray:
        return as_keys(*(key % self.size if self.size else key for key in drawn))

    def row(self, key: int) -> np.ndarray:
        if key not in self.rows:
            self.rows[key] = twins.first_value(int(self.table.form.stream), key, self.dim, "uniform", -1.0, 1.0)
        return self.rows[key]

    def block(self, data, num: int) -> np.ndarray:
        drawn = data.draw(st.lists(numbers, min_size=num * self.dim, max_size=num * self.dim))
        return np.array(drawn, np.float32).reshape(num, self.dim)

    @rule(drawn=st.lists(any_keys, max_size=40))
    def pull(self, drawn) -> None:
        keys = self.keys(drawn)
        found = self.table.pull(keys)
        assert found.shape == (len(keys), self.dim)
        for key, row in zip(keys.tolist(), found, strict=True):
            assert twins.same_bits(row, self.row(key))

    @rule(drawn=st.lists(any_keys, max_size=20))
    def pull_without_create(self, drawn) -> None:
        keys = self.keys(drawn)
        for key, row in zip(keys.tolist(), self.table.pull(keys, create=False), strict=True):
            assert twins.same_bits(row, self.rows.get(key, np.zeros(self.dim, np.float32)))

    @rule(drawn=st.lists(any_keys, max_size=12), data=st.data())
    def push(self, drawn, data) -> None:
        keys = self.keys(drawn)
        grads = self.block(data, len(keys))
        self.table.push(keys, grads)
        self.step += 1
        for key, total in zip(*twins.sum_by_key(keys, grads), strict=True):
            row = self.row(int(key)) * np.float32(self.factor)
            gradient = total + np.float32(self.added) * row if self.added else total
            self.rows[int(key)] = row - np.float32(self.lr) * gradient

    @rule(drawn=st.lists(any_keys, max_size=8), data=st.data())
    def add(self, drawn, data) -> None:
        keys = self.keys(drawn)
        deltas = self.block(data, len(keys))
        added(self.table, keys, deltas)
        self.step += 1
        for key, total in zip(*twins.sum_by_key(keys, deltas), strict=True):
            self.rows[int(key)] = self.row(int(key)) + total

    @rule(drawn=st.lists(any_keys, min_size=1, max_size=8), data=st.data())
    def push_a_nan(self, drawn, data) -> None:
        keys = self.keys(drawn)
        grads = self.block(data, len(keys))
        grads[data.draw(st.integers(0, len(keys) - 1)), 0] = np.nan
        with pytest.raises(TableError):
            self.table.push(keys, grads)

    @rule(drawn=st.lists(any_keys, max_size=8), data=st.data())
    def assign(self, drawn, data) -> None:
        keys = self.keys(drawn)
        values = self.block(data, len(keys))
        self.table.assign(keys, values)
        self.rows |= dict(zip(keys.tolist(), values, strict=True))

    @rule(drawn=st.lists(any_keys, max_size=12), known=st.integers(0, 30))
    def erase(self, drawn, known) -> None:
        keys = np.append(self.keys(drawn), as_keys(*list(self.rows)[:known]))
        gone = set(keys.tolist()) & self.rows.keys()
        assert self.table.erase(keys) == len(gone)
        for key in gone:
            del self.rows[key]

    @rule(num_rows=st.integers(1, 50))
    def walk(self, num_rows) -> None:
        found = [
            pair for keys, rows, _ in self.table.chunks(num_rows) for pair in zip(keys.tolist(), rows, strict=True)
        ]
        assert sorted(key for key, _ in found) == sorted(self.rows)
        assert all(twins.same_bits(row, self.rows[key]) for key, row in found)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "table"):
            stats = self.table.stats()
            assert (stats["rows"], stats["step"]) == (len(self.rows), self.step)


TestTableIsADictOfRows = TableMachine.TestCase
TestTableIsADictOfRows.settings = settings(max_examples=examples(25), stateful_step_count=30)


# Narrow rows, in their map and beside it


@pytest.mark.slow
@pytest.mark.parametrize("rule_name", first_of(["adam", "sgd", "adagrad"]))
def test_rows_in_their_map_are_bit_equal_to_rows_beside_it(rule_name):
    """The same pulls, pushes, erases and saves; the maps are carried over all the time."""
    rng = np.random.default_rng(3)
    spec = {"dim": 2, "rule": Rule(rule_name, lr=0.1), "initializer": UNIFORM}
    with (
        mock.patch.multiple(keymap, SMALL=1),
        mock.patch.multiple(packed_map, SMALL=1, FIRST_BUCKETS=2),
    ):
        both = make_indexed("sparse", 0, **spec), make_indexed("wide", 0, **spec)
        assert [type(table.index).__name__ for table in both] == ["PackedMap", "KeyMap"]
        for turn in range(60):
            keys = rng.integers(0, 8000, 300, dtype=np.uint64)
            grads = rng.standard_normal((300, 2), np.float32)
            gone = rng.integers(0, 8000, 40, dtype=np.uint64)
            found = []
            for table in both:
                pulled = table.pull(keys)
                table.push(keys[::-1], grads)
                erased = table.erase(gone)
                delta: list[tuple[int, bytes]] = []
                if turn % 5 == 4:
                    table.begin_save(is_committed=turn % 10 == 9)
                    lost = set(table.absent(table.tracking.gone).tolist())
                    for piece, rows, _ in table.chunks(97, save="delta"):
                        delta += [(key, row.tobytes()) for key, row in zip(piece.tolist(), rows, strict=True)]
                    delta += [(key, b"") for key in lost]
                found.append((pulled.tobytes(), erased, sorted(delta)))
            assert found[0] == found[1]
            assert turn % 5 != 4 or turn == 4 or len(found[0][2]) > 100
    assert contents(both[0]) == contents(both[1])


def test_narrow_tables_without_policies_have_their_rows_in_the_map():
    def kind(**fields) -> str:
        return type(make_table(**fields).index).__name__

    assert kind(dim=10) == "PackedMap"
    assert kind(dim=11) == "KeyMap"
    assert kind(dim=5, rule=Rule("adagrad")) == "PackedMap"
    assert kind(dim=6, rule=Rule("adagrad")) == "KeyMap"
    assert kind(dim=1, entry=AdmissionEntry(count=2)) == "KeyMap"
    assert kind(dim=1, shrink=Shrink(max_rows=100)) == "KeyMap"
    assert kind(dim=1, shrink=Shrink(min_norm=0.1)) == "PackedMap"


def test_rows_of_a_small_norm_are_dropped_from_their_map_too():
    table = make_table(dim=1, rule=Rule("sgd", lr=1.0))
    keys = np.arange(3000, dtype=np.uint64)
    table.assign(keys, (keys % 3).astype(np.float32).reshape(-1, 1))
    assert sum(shrink(table, Shrink(min_norm=0.5))) == 1000
    assert contents(table) == {key: [key % 3] for key in range(3000) if key % 3}


@pytest.mark.parametrize("repeats", [False, True])
def test_a_push_that_follows_no_pull_finds_by_rows_whether_a_key_repeats(repeats):
    """As a backup gets it: some keys have rows, others get them."""
    table, dice = make_table(dim=16, rule=Rule("sgd", lr=0.5)), np.random.default_rng(0)
    keys = dice.permutation(5 * CHUNK)[: CHUNK + 500].astype(np.uint64)
    table.assign(keys[::3], np.ones((len(keys[::3]), 16), np.float32))
    if repeats:
        keys[[7, -1]] = keys[[CHUNK + 3, 5]]  # in another chunk, and in one that has come before
    grads = dice.normal(size=(len(keys), 16)).astype(np.float32)
    with ExitStack() as stack:
        if not repeats:
            fails = mock.Mock(side_effect=AssertionError("keys are compared"))
            stack.enter_context(mock.patch.object(sparse_table, "sum_by_key", fails))
        before = table.pull(keys, create=False)
        table.push(keys, grads)
    sums = {int(key): np.zeros(16) for key in keys}
    for key, grad in zip(keys.tolist(), grads, strict=True):
        sums[key] += grad
    expected = before - 0.5 * np.array([sums[key] for key in keys.tolist()])
    np.testing.assert_allclose(table.pull(keys, create=False), expected, rtol=1e-5, atol=1e-6)
    assert table.num_rows >= len(sums)
    assert table.step == 1
