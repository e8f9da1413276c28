"""Groups of tables on a GPU: many programs at once, CUDA graphs, and no wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec.structs
import numpy as np
import pytest
import torch
from support.device_tables import RULES, assert_one_row_each, spec
from support.table_groups import assert_equal, drawn, grouped, named, step

from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_group import TableGroup
from torchfleet.ps.tables.settings.spec import Rule

pytestmark = pytest.mark.gpu

TABLES = 26


def tables(num: int = TABLES, capacity: int = 1 << 15, rule: str = "adam", dim: int = 16) -> list[DeviceTable]:
    described = spec(dim=dim, rule=RULES[rule])
    return [DeviceTable(msgspec.structs.replace(described, name=f"t{k}"), "cuda", capacity) for k in range(num)]


def random_ids(sizes: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Ids that repeat, some of them much more often than others."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [(torch.rand(size, generator=generator, device="cuda").pow(4) * 20_000).long() for size in sizes]


def random_grads(sizes: Sequence[int], dim: int, seed: int) -> torch.Tensor:
    return torch.randn(sum(sizes), dim, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * 0.1


def joined_step(group: TableGroup, ids: Sequence[torch.Tensor], grads: torch.Tensor) -> list[torch.Tensor]:
    """One lookup and one update; returns the values before it."""
    found = group.find_and_gather([(number, own, None) for number, own in enumerate(ids)], insert=True)
    group.push([len(own) for own in ids], torch.cat([slots for slots, _ in found]), grads)
    return [values for _, values in found]


@pytest.mark.parametrize("rule", RULES)
def test_updates_equal_those_of_tables_alone_bit_for_bit(rule: str) -> None:
    group, alone = grouped("triton", named(spec(dim=6, rule=RULES[rule])))
    random = np.random.default_rng(1)
    for number in range(4):
        step(group, alone, drawn(random, number), 0.1 / (number + 1))
    assert_equal(group, alone)


def test_runs_over_thousands_of_tiles_are_summed_as_in_tables_alone() -> None:
    group, alone = grouped("triton", named(spec(dim=16, rule=Rule("adam", 0.1))))
    for seed in range(2):
        random = np.random.default_rng(seed)
        step(group, alone, [random.integers(0, 3, 40_000), random.integers(0, 30, 20_000), np.zeros(70_000, np.int64)])
    assert_equal(group, alone)


@pytest.mark.parametrize("seed", range(5))
def test_every_key_gets_one_row_in_each_table(seed: int) -> None:
    group = TableGroup(tables())
    ids = random_ids([1 << 15, 0, 7] + [1 << 12] * (TABLES - 3), seed)
    for table, own, (slots, values) in zip(
        group.tables, ids, group.find_and_gather([(k, own, None) for k, own in enumerate(ids)], True), strict=True
    ):
        assert_one_row_each(table, own, slots, values)


def test_tables_grow_in_a_group_under_load() -> None:
    made = [tables(4, capacity, "momentum") for capacity in (1 << 10, 1 << 16)]
    group, alone = TableGroup(made[0]), made[1]
    for seed in range(4):
        sizes = [1 << 13, 100, 1 << (9 + seed), 0]
        ids, grads = random_ids(sizes, seed), random_grads(sizes, 16, seed)
        joined_step(group, ids, grads)
        for table, own, grad in zip(alone, ids, grads.split(sizes), strict=True):
            table.push(table.find(own, insert=True), grad)
    assert len(group.tables[0].memory.rows.segments) > 1
    for table, expected in zip(group.tables, alone, strict=True):
        every = torch.arange(20_000, device="cuda")
        assert table.num_rows == expected.num_rows
        found = table.find_and_gather(every)[1]
        # Rows have other numbers, so that sums over tiles are made of other parts.
        torch.testing.assert_close(found, expected.find_and_gather(every)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_captured_step_replays(is_known: bool) -> None:
    """`is_known`: the shapes of the captured batch appeared before; otherwise kernels write its segments."""
    sizes = [1000, 0, 3000]
    group, alone = TableGroup(tables(3, rule="momentum")), tables(3, rule="momentum")
    static = random_ids(sizes, 0)
    warm = static if is_known else [own[:10] for own in static]
    grads = random_grads(sizes, 16, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            joined_step(group, warm, grads[: sum(map(len, warm))])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = joined_step(group, static, grads)
    for _ in range(3):
        expected = [table.find(own, insert=True) for table, own in zip(alone, warm, strict=True)]
        for table, slots, num in zip(alone, expected, map(len, warm), strict=True):
            table.push(slots, grads[:num] if table is alone[0] else grads[len(warm[0]) : len(warm[0]) + num])
    for seed in range(1, 4):
        ids = random_ids(sizes, seed)
        for to, own in zip(static, ids, strict=True):
            to.copy_(own)
        graph.replay()
        joined = [table.find_and_gather(own, insert=True) for table, own in zip(alone, ids, strict=True)]
        for values, (_, wanted) in zip(read, joined, strict=True):
            torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-4)
        for table, (slots, _), grad in zip(alone, joined, grads.split(sizes), strict=True):
            table.push(slots, grad)
        joined_step(group, [own[:0] for own in ids], grads[:0])  # an eager step between replays
        for table in alone:
            table.push(torch.empty(0, dtype=torch.int32, device="cuda"), grads[:0])
    for table, other in zip(group.tables, alone, strict=True):
        assert table.step == other.step == 9
        assert table.num_rows == other.num_rows


def test_a_step_waits_for_nothing() -> None:
    group, sizes = TableGroup(tables()), [256] * TABLES
    ids, grads = random_ids(sizes, 0), random_grads(sizes, 16, 0)
    joined_step(group, ids, grads)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            joined_step(group, ids, grads)
        joined_step(group, [own[:100] for own in ids], grads[: 100 * TABLES])  # other shapes: segments are copied
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_that_are_left_are_known_from_shared_copies() -> None:
    """Copies of the counters arrive while the host goes on; a table grows before its rows run out."""
    group = TableGroup(tables(3, capacity=1 << 12))
    for seed in range(40):
        sizes = [300, 20, 0]
        joined_step(group, random_ids(sizes, seed), random_grads(sizes, 16, seed))
        group.tables[1].find(random_ids([50], seed)[0], insert=True)  # a lookup beside the group's
    for table in group.tables:
        table.check()
        assert table.num_rows == sum(len(block.keys) for block in table.rows())
