"""Tables of a group against the same tables alone, bit for bit, with each set of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_tables import ANY_IDS, RULES, ids_of, spec
from support.table_groups import NUM, assert_equal, drawn, grouped, named, step

from torchfleet.base.errors import TableError, WrongIds
from torchfleet.ps.gpu import device_table as device_tables
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_group import TableGroup
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Initializer, Rule

KERNELS = ("plain", "triton")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", RULES)
def test_a_group_is_equal_to_its_tables_bit_for_bit(rule: str, kernels: str) -> None:
    group, alone = grouped(kernels, named(spec(dim=6, rule=RULES[rule])))
    random = np.random.default_rng(1)
    for number in range(3):
        step(group, alone, drawn(random, number), 0.1 / (number + 1))
    assert_equal(group, alone)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [1, 16, 40])
def test_rows_of_any_width_are_equal(dim: int, kernels: str) -> None:
    group, alone = grouped(kernels, named(spec(dim=dim, rule=Rule("adam", 0.1))))
    random = np.random.default_rng(2)
    for number in range(3):
        rate = torch.tensor(0.05, device=group.device) if number else None
        step(group, alone, drawn(random, number), rate)
    assert_equal(group, alone)


@pytest.mark.parametrize("kernels", KERNELS)
def test_runs_over_groups_of_tiles_are_equal(kernels: str) -> None:
    """At this width four tiles of 64 are a group, whose parts are added up before the others."""
    group, alone = grouped(kernels, named(spec(dim=600, rule=Rule("adagrad", 0.1))))
    step(group, alone, [np.full(700, 5), np.arange(300) // 140, ANY_IDS])
    assert_equal(group, alone)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first", [Initializer("constant", 0.3), Initializer("truncated_normal", 0.0, 1.0)])
def test_first_values_are_those_of_each_table(first: Initializer, kernels: str) -> None:
    group, alone = grouped(kernels, named(spec(dim=5, initializer=first)))
    step(group, alone, [np.arange(40), np.arange(40), ANY_IDS])
    assert_equal(group, alone)


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_table_grows_while_the_others_stay(kernels: str) -> None:
    group, alone = grouped(kernels, named(spec(dim=4, rule=Rule("adagrad", 0.1))), capacity=64)
    for number in range(1, 5):
        step(group, alone, [np.arange(20), np.arange(60 * number), ANY_IDS])
    assert [len(table.memory.rows.segments) > 1 for table in group.tables] == [False, True, False]
    assert_equal(group, alone)


@pytest.mark.parametrize("kernels", KERNELS)
def test_tables_with_a_limit_evict_their_own_rows(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tables.time, "time", lambda: 1_000_000.0)
    group, alone = grouped(kernels, named(spec(dim=4, shrink=Shrink(max_rows=100, ttl_days=9))))
    for number in range(4):
        step(group, alone, [np.arange(30), np.arange(60 * number, 60 * number + 80), ANY_IDS])
    assert [table.num_evicted > 0 for table in group.tables] == [False, True, False]
    assert_equal(group, alone)


@pytest.mark.parametrize("kernels", KERNELS)
def test_some_tables_are_looked_up(kernels: str) -> None:
    """Tables of a call in any order, without insertion, and removed rows."""
    group, alone = grouped(kernels, named(spec(dim=4)))
    step(group, alone, [np.arange(50)] * NUM)
    for tables in (group.tables, alone):
        assert tables[2].remove(ids_of(tables[2], np.arange(10))) == 9  # 7 is padding
    ids = ids_of(alone[0], np.arange(5, 60))
    for number, (slots, values) in zip((2, 0), group.find_and_gather([(2, ids, 11), (0, ids, None)]), strict=True):
        expected = alone[number].find_and_gather(ids, padding=11 if number else None)
        assert torch.equal(slots, expected[0])
        assert torch.equal(values, expected[1])
    assert group.find_and_gather([(1, ids[:0], None)])[0][1].shape == (0, 4)
    assert_equal(group, alone)


@pytest.mark.parametrize("kernels", KERNELS)
def test_ids_beyond_the_size_of_a_table_are_found(kernels: str) -> None:
    any_id, sized = spec(dim=4, name="any"), spec(dim=4, name="sized", kind="array", size=30)
    small = spec(dim=4, name="small", kind="array", size=10)
    group, alone = grouped(kernels, [small, any_id, sized])
    step(group, alone, [np.arange(10), ANY_IDS, np.arange(30)])
    ids = ids_of(alone[0], np.arange(29, 31))
    with pytest.raises(WrongIds, match="'sized': 1 ids"):
        look_up_and_check(group, ids)


def look_up_and_check(group: TableGroup, ids: torch.Tensor) -> None:
    group.find_and_gather([(1, ids, None), (2, ids, None)])
    group.tables[2].occupancy.refresh()  # on a GPU, the host does not wait in the lookup
    group.tables[2].check()


@pytest.mark.parametrize("kernels", KERNELS)
def test_numbers_of_slots_beyond_32_bits_are_sorted(kernels: str) -> None:
    group, alone = grouped(kernels, named(spec(dim=4, rule=Rule("adam", 0.1))))
    group.memory.num_slots = 1 << 31
    step(group, alone, [np.arange(50), np.arange(200) // 3, ANY_IDS])
    assert_equal(group, alone)


def test_tables_of_different_shapes_make_no_group() -> None:
    tables = [DeviceTable(spec(name=f"of {dim}", dim=dim), "cpu", 64) for dim in (4, 8)]
    with pytest.raises(TableError, match=r"'of 4' and 'of 8'"):
        TableGroup(tables)
    tables[0].is_captured = True
    with pytest.raises(TableError, match="CUDA graph"):
        TableGroup(tables[:1])


def test_numbers_of_slots_must_be_those_of_the_tables() -> None:
    group = TableGroup([DeviceTable(each, "cpu", 64) for each in named(spec(dim=4))])
    slots = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(TableError, match="3 tables"):
        group.push([1, 3], slots, torch.zeros(4, 4))
    with pytest.raises(TableError, match="gradients"):
        group.push([1, 3, 0], slots, torch.zeros(4, 5))
