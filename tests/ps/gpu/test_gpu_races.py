"""Keys that many programs insert at once, on a GPU: an interpreter shows no races."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.device_tables import RULES, assert_one_row_each, spec

from torchfleet.base.errors import TableError
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.kernels import plain_kernels
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Rule

pytestmark = pytest.mark.gpu

COMMON = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def drawn(num: int, distinct: int, seed: int) -> torch.Tensor:
    """Ids that repeat, some of them much more often than others."""
    generator = torch.Generator("cuda").manual_seed(seed)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (distinct,), generator=generator, device="cuda")
    keys[:2] = torch.tensor([-(1 << 63), -(1 << 63) + 1])  # the marks of empty and removed entries
    places = torch.rand(num, generator=generator, device="cuda").pow(4) * distinct
    return keys[places.long()]


@pytest.mark.parametrize("seed", range(20))
def test_every_key_gets_one_row(seed: int) -> None:
    table = DeviceTable(spec(dim=4), "cuda", capacity=1 << 18)
    ids = drawn(1 << 20, 200_000, seed)
    assert_one_row_each(table, ids, *table.find_and_gather(ids, insert=True))


def test_rows_survive_growth_and_removal_under_load() -> None:
    table = DeviceTable(spec(dim=4), "cuda", capacity=1 << 12)
    known = torch.empty(0, dtype=torch.int64, device="cuda")
    for seed in range(12):
        ids = drawn(1 << 17, 60_000, seed)
        table.find(ids, insert=True)
        known = torch.unique(torch.cat([known, ids]))
        gone = known[::3]
        assert table.remove(gone) == len(gone)
        known = known[~torch.isin(known, gone)]
        assert table.num_rows == len(known)
        slots, values = table.find_and_gather(known)
        assert torch.equal(table.memory.row_keys[slots.long()], known)
        assert torch.equal(values, table.layout.first_words(known)[:, :4])
        assert bool((table.find(gone) == -1).all())


@pytest.mark.parametrize(("rule", "dim"), [*itertools.product(COMMON, (10, 128)), *((rule, 6) for rule in RULES)])
def test_updates_equal_those_in_plain_torch(rule: str, dim: int) -> None:
    tables = [DeviceTable(spec(dim=dim, rule=RULES[rule]), device, 1 << 16) for device in ("cuda", "cpu")]
    for seed in range(3):
        ids = drawn(1 << 15, 20_000, seed)
        grads = torch.randn(len(ids), dim, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * 0.1
        for table in tables:
            slots = table.find(ids.to(table.device), insert=True)
            table.push(slots, grads.to(table.device))
    ids = torch.unique(ids)
    found, expected = (table.find_and_gather(ids.to(table.device))[1].cpu() for table in tables)
    # Sums of gradients in another order differ in the last bits, which Adam divides by a root that may be as small.
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


def test_deterministic_tables_are_equal_bit_for_bit() -> None:
    results = []
    for _ in range(3):
        table = DeviceTable(spec(dim=16, rule=Rule("adam", 0.1)), "cuda", 1 << 16, deterministic=True)
        for seed in range(4):
            ids = drawn(1 << 17, 30_000, seed)
            generator = torch.Generator("cuda").manual_seed(seed)
            grads = torch.randn(len(ids), 16, generator=generator, device="cuda")
            table.push(table.find(ids, insert=True), grads)
        results.append(table.find_and_gather(torch.unique(ids))[1])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_captured_step_replays() -> None:
    """The rows after a replay are those of the same step without a graph; a full table reads NaN, and is reported."""
    described = spec(dim=16, rule=Rule("adam", 0.1), shrink=Shrink())
    graphed, plain = (DeviceTable(described, "cuda", 1 << 12) for _ in range(2))
    ids, grads = drawn(1 << 10, 500, 0), torch.randn(1 << 10, 16, device="cuda")
    static = ids.clone()

    def step(table: DeviceTable, ids: torch.Tensor) -> torch.Tensor:
        slots, values = table.find_and_gather(ids, insert=True)
        table.push(slots, grads)
        return values

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(graphed, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = step(graphed, static)
    step(plain, ids)
    for seed in range(1, 4):
        static.copy_(drawn(1 << 10, 500, seed))
        graph.replay()
        step(plain, drawn(1 << 10, 500, seed))
    every = torch.cat([drawn(1 << 10, 500, seed) for seed in range(4)])
    torch.testing.assert_close(graphed.find_and_gather(every)[1], plain.find_and_gather(every)[1], rtol=1e-5, atol=1e-6)
    assert graphed.step == plain.step == 4
    for seed in range(4, 14):
        static.copy_(drawn(1 << 10, 2000, seed))
        graph.replay()
    torch.cuda.synchronize()
    has_row = graphed.find(static) >= 0
    assert bool(read[~has_row].isnan().all())
    assert bool(read[has_row].isfinite().all())
    assert 0 < int(has_row.sum()) < len(static)
    graphed.occupancy.refresh()
    with pytest.raises(TableError, match="'ads'"):
        graphed.check()
    assert sum(len(block.keys) for block in graphed.rows()) == graphed.num_rows == 1 << 12


@pytest.mark.parametrize(("capacity", "shrink"), [(None, Shrink()), (1 << 12, Shrink(max_rows=1 << 12))])
def test_a_table_that_needs_the_host_when_it_is_full_is_not_captured(capacity: int | None, shrink: Shrink) -> None:
    table = DeviceTable(spec(dim=4, shrink=shrink), "cuda", capacity)
    ids = drawn(1 << 10, 500, 0)
    table.find(ids, insert=True)
    with pytest.raises(TableError, match=r"'ads'.*capacity"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        table.find(ids, insert=True)
    assert table.num_rows == len(torch.unique(ids))  # it goes on without a graph


def test_find_needs_no_host() -> None:
    """The kernels of a step in which all keys are known do not wait for the device."""
    table = DeviceTable(spec(dim=16), "cuda", 1 << 16)
    ids, grads = drawn(1 << 12, 2000, 0), torch.randn(1 << 12, 16, device="cuda")
    table.push(table.find(ids, insert=True), grads)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            table.push(table.find_and_gather(ids, insert=True)[0], grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_plain_kernels_work_on_a_gpu() -> None:
    table = DeviceTable(spec(dim=4), "cuda", 1 << 12)
    other = DeviceTable(spec(dim=4), "cuda", 1 << 12)
    other.kernels = plain_kernels
    ids = drawn(1 << 12, 2000, 0)
    assert torch.equal(table.find_and_gather(ids, insert=True)[1], other.find_and_gather(ids, insert=True)[1])
