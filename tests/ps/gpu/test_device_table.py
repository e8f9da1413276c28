"""Tables on devices against tables on servers, with each set of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_tables import ANY_IDS, RULES, device_table, ids_of, on_server, spec

from torchfleet.base.errors import TableError, WrongIds
from torchfleet.ps.gpu import device_table as device_table_module
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.eviction import DIRECTORY_BYTES
from torchfleet.ps.gpu.kernels import plain_rules
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Initializer, Rule

KERNELS = ("plain", "triton")
FIRST = {
    "constant": Initializer("constant", 0.3),
    "uniform": Initializer("uniform", -0.05, 0.05),
    "normal": Initializer("normal", 0.1, 2.0),
    "truncated_normal": Initializer("truncated_normal", 0.0, 1.0),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("first", FIRST)
def test_first_values_equal_those_of_servers_bit_for_bit(first: str, kernels: str) -> None:
    described = spec(dim=5, initializer=FIRST[first])
    table, server = device_table(described, kernels), on_server(described)
    ids = np.concatenate([ANY_IDS, np.random.default_rng(0).integers(-(1 << 62), 1 << 62, 200)])
    slots, values = table.find_and_gather(ids_of(table, ids), insert=True)
    np.testing.assert_array_equal(values.cpu().numpy(), server.look_up(ids.view(np.uint64)))
    assert len(torch.unique(slots)) == len(ids)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", RULES)
def test_updates_equal_those_of_servers(rule: str, kernels: str) -> None:
    described = spec(dim=6, rule=RULES[rule])
    table, server, random = device_table(described, kernels), on_server(described), np.random.default_rng(1)
    for step in range(4):
        ids = np.concatenate([random.choice(ANY_IDS, 150), random.integers(0, 30, 150), [12] * 100])
        grads = random.normal(0, 0.2, (len(ids), 6)).astype(np.float32)
        server.look_up(ids.view(np.uint64))
        server.push(ids.view(np.uint64), grads, lr=0.1 / (step + 1))
        slots = table.find(ids_of(table, ids), insert=True)
        table.push(slots, torch.from_numpy(grads).to(table.device), lr=0.1 / (step + 1))
    distinct = np.unique(ids)
    values = table.find_and_gather(ids_of(table, distinct))[1]
    np.testing.assert_allclose(values.cpu().numpy(), server.look_up(distinct.view(np.uint64)), rtol=2e-5, atol=2e-6)
    assert table.step == 4
    assert table.num_rows == server.num_rows


@pytest.mark.parametrize("kernels", KERNELS)
def test_repeated_ids_of_any_number_are_summed(kernels: str) -> None:
    """Runs shorter and longer than a tile, over the edges of tiles of several levels, and absent ids."""
    table = device_table(spec(dim=3, rule=Rule("sgd", 1.0), initializer=Initializer("constant", 0.0)), kernels)
    lengths = [1, 3, 31, 32, 33, 64, 700, 1, 1, 5]
    order = np.random.default_rng(2).permutation(np.repeat(np.arange(len(lengths)), lengths))
    slots = table.find(ids_of(table, order), insert=True)
    slots = torch.cat([slots, torch.full((40,), -1, dtype=torch.int32, device=table.device)])
    grads = torch.from_numpy(np.random.default_rng(3).integers(-8, 8, (len(slots), 3)).astype(np.float32))
    table.push(slots, grads.to(table.device))
    expected = torch.zeros(len(lengths), 3).index_add_(0, torch.from_numpy(order), grads[: len(order)])
    values = table.find_and_gather(ids_of(table, np.arange(len(lengths))))[1]
    torch.testing.assert_close(values.cpu(), -expected, rtol=0, atol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_table_grows_and_its_rows_stay(kernels: str) -> None:
    table = device_table(spec(dim=4), kernels, capacity=64)
    random = np.random.default_rng(4)
    ids = random.permutation(np.concatenate([random.integers(-(1 << 62), 1 << 62, 900), ANY_IDS]))
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for some in np.array_split(ids, 9):
        slots, values = table.find_and_gather(ids_of(table, some), insert=True)
        before.append((slots, values))
    slots, values = table.find_and_gather(ids_of(table, ids))
    assert torch.equal(slots, torch.cat([slots for slots, _ in before]))
    assert torch.equal(values, torch.cat([values for _, values in before]))
    assert len(table.memory.rows.segments) > 2
    assert table.num_rows == len(ids)


@pytest.mark.parametrize("kernels", KERNELS)
def test_absent_ids_read_as_zeros_and_get_no_row(kernels: str) -> None:
    table = device_table(spec(), kernels)
    slots, values = table.find_and_gather(ids_of(table, ANY_IDS))
    assert (slots == -1).all()
    assert not values.any()
    assert table.num_rows == 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_padding_gets_no_row(kernels: str) -> None:
    table = device_table(spec(), kernels)
    slots, values = table.find_and_gather(ids_of(table, np.array([5, 7, 5, 9])), insert=True, padding=5)
    assert slots.tolist()[0] == slots.tolist()[2] == -1
    assert not values[0].any()
    assert table.num_rows == 2


@pytest.mark.parametrize("kernels", KERNELS)
def test_removed_rows_begin_anew(kernels: str) -> None:
    described = spec(dim=4, rule=Rule("adam", 0.1))
    table, server = device_table(described, kernels), on_server(described)
    ids = np.concatenate([ANY_IDS, np.arange(100, 200)])
    for _ in range(3):
        slots = table.find(ids_of(table, ids), insert=True)
        table.push(slots, torch.ones(len(ids), 4, device=table.device))
        assert table.remove(ids_of(table, ids[:60])) == 60
        assert table.num_rows == len(ids) - 60
        assert (table.find(ids_of(table, ids[:60])) == -1).all()
    _, values = table.find_and_gather(ids_of(table, ids), insert=True)
    np.testing.assert_array_equal(values[:60].cpu().numpy(), server.look_up(ids[:60].view(np.uint64)))
    assert (values[60:].cpu().numpy() != server.look_up(ids[60:].view(np.uint64))).all()
    assert table.capacity == 256
    words = torch.cat([block.words for block in table.rows() for _ in [0]])
    assert len(words) == table.num_rows


def test_rows_and_put_carry_values_and_state_to_another_table() -> None:
    described = spec(dim=4, rule=Rule("adam", 0.1), shrink=Shrink(max_rows=10_000))
    table, other = device_table(described, "plain"), device_table(described, "plain")
    slots = table.find(ids_of(table, ANY_IDS), insert=True)
    table.push(slots, torch.ones(len(ANY_IDS), 4))
    for block in table.rows(num_rows=3):
        arrays = block.arrays()
        assert arrays["keys"].dtype == np.uint64
        assert arrays["rows"].shape == (len(block.keys), 12)
        assert arrays["tick"].dtype == np.uint32
        other.put(block.keys, block.words, block.columns)
    other.step = table.step
    for each in (table, other):
        slots = each.find(ids_of(each, ANY_IDS), insert=True)
        each.push(slots, torch.full((len(ANY_IDS), 4), 0.5))
    assert torch.equal(
        table.find_and_gather(ids_of(table, ANY_IDS))[1], other.find_and_gather(ids_of(other, ANY_IDS))[1]
    )


def test_put_takes_the_last_of_equal_keys() -> None:
    table = device_table(spec(dim=2), "plain")
    table.put(torch.tensor([4, 4, 5]), torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    assert table.find_and_gather(torch.tensor([4, 5]))[1].tolist() == [[2.0, 2.0], [3.0, 3.0]]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_limit_evicts_the_rows_used_least_recently(kernels: str) -> None:
    table = device_table(spec(dim=4, shrink=Shrink(max_rows=100)), kernels)
    one = torch.ones(50, 4, device=table.device)
    for ids in (np.arange(50), np.arange(50, 100), np.arange(50), np.arange(100, 150)):
        table.push(table.find(ids_of(table, ids), insert=True), one)
    assert (table.find(ids_of(table, np.arange(50))) >= 0).all()
    assert (table.find(ids_of(table, np.arange(50, 100))) == -1).all()
    assert table.num_rows == 100
    assert table.num_evicted == 50
    with pytest.raises(TableError, match="'ads'"):
        table.find(ids_of(table, np.arange(1000, 1101)), insert=True)
    assert table.num_rows <= 100


def test_a_table_without_memory_raises_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    table = device_table(spec(), "plain", capacity=64)
    table.find(torch.arange(60), insert=True)

    def grow(num_rows: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(table.memory.rows, "grow", grow)
    with pytest.raises(TableError, match="'ads'"):
        table.find(torch.arange(100), insert=True)
    assert table.num_rows == 60
    assert (table.find(torch.arange(60)) >= 0).all()
    assert sum(len(block.keys) for block in table.rows()) == 60


def test_a_table_without_memory_to_double_grows_by_the_rows_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = device_table(spec(), "plain", capacity=64)
    table.find(torch.arange(256), insert=True)
    assert table.capacity == 256
    grow = table.memory.rows.grow

    def grow_little(num_rows: int) -> None:
        if num_rows > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        grow(num_rows)

    monkeypatch.setattr(table.memory.rows, "grow", grow_little)
    slots = table.find(torch.arange(160, 260), insert=True)
    assert len(torch.unique(slots[slots >= 0])) == 100
    assert (table.capacity, table.num_rows) == (320, 260)


def test_a_table_with_as_many_rows_as_slots_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_table_module, "MAX_SLOTS", 320)
    table = device_table(spec(), "plain", capacity=64)
    table.find(torch.arange(256), insert=True)
    table.find(torch.arange(256, 320), insert=True)
    assert (table.capacity, table.num_rows) == (320, 320)
    assert (table.find(torch.arange(320), insert=True) >= 0).all()
    assert (table.find(torch.arange(1, 321), insert=True, padding=320)[:-1] >= 0).all()  # padding needs no row
    with pytest.raises(TableError, match="'ads'"):
        table.find(torch.arange(310, 321), insert=True)
    assert table.num_rows == 320


@pytest.mark.parametrize("kernels", KERNELS)
def test_ids_beyond_a_declared_size_raise(kernels: str) -> None:
    table = device_table(spec(kind="array", size=10), kernels)
    table.find(ids_of(table, np.arange(10)), insert=True)
    if table.device.type == "cuda":  # a GPU tells at the next call
        table.find(ids_of(table, np.array([3, 10])), insert=True)
        torch.cuda.synchronize()
    with pytest.raises(WrongIds, match="'ads'"):
        table.find(ids_of(table, np.array([3, 10])), insert=True)


@pytest.mark.parametrize("ids", [torch.rand(3), torch.ones(3, dtype=torch.bool), [1, 2]])
def test_ids_that_are_no_integers_raise(ids: object) -> None:
    with pytest.raises(WrongIds, match="'ads'"):
        device_table(spec(), "plain").find(ids)  # type: ignore[arg-type]


def test_a_shrink_drops_rows_by_their_norm() -> None:
    table = device_table(spec(dim=2, shrink=Shrink(min_norm=0.5, max_share=1.0)), "plain")
    table.put(torch.arange(3), torch.tensor([[0.1, 0.1], [1.0, 1.0], [0.0, 0.0]]))
    assert table.shrink() == 2
    assert [block.keys.tolist() for block in table.rows()] == [[1]]


def test_a_rule_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(plain_rules._FORMULAS, "ftrl")
    with pytest.raises(TableError, match=r"'ads'.*ftrl"):
        DeviceTable(spec(rule=Rule("ftrl", 0.1)), "cpu")


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(TableError, match="'ads'"):
        DeviceTable(spec(), "cuda" if not torch.cuda.is_available() else "cuda:77")


@pytest.mark.parametrize("limit", ["max_rows", "max_bytes"])
def test_a_shrink_to_a_limit_counts_the_rows_of_all_shards(limit: str) -> None:
    """By another policy than the table's own."""
    own = Shrink(max_rows=1000)
    table = device_table(spec(dim=2, rule=Rule("sgd", 0.1), shrink=own, shard=1, num_shards=4), "plain")
    row_bytes = 4 * table.layout.width + DIRECTORY_BYTES
    policy = Shrink(max_rows=100) if limit == "max_rows" else Shrink(max_bytes=100 * row_bytes)
    table.push(table.find(torch.arange(50), insert=True), torch.ones(50, 2))
    table.push(table.find(torch.arange(50, 80), insert=True), torch.ones(30, 2))
    table.push(table.find(torch.arange(1), insert=True), torch.ones(1, 2))
    assert table.shrink(policy) == 55
    assert table.num_rows == 25
    assert (table.find(torch.tensor([0])) >= 0).all()
