"""Tables of one width that are looked up together learn what plain torch learns, however a model uses them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import each_of
from support.jobs import fleet_optimizer, one_worker

from torchfleet.ps.kernels.table_groups import are_keys_at
from torchfleet.ps.worker.batch.foresight import Way
from torchfleet.ps.worker.batch.recipe import Input, Recipe
from torchfleet.ps.worker.batch.window import Window
from torchfleet.ps.worker.client.shard import Keys
from torchfleet.ps.worker.lookup.batch_rows import BatchRows
from torchfleet.ps.worker.lookup.distinct_parts import DistinctParts
from torchfleet.ps.worker.lookup.grouped_rows import GroupedRows
from torchfleet.ps.worker.lookup.thread_state import ThreadState

SIZES, DIM, NUM_SAMPLES = (5, 40, 7, 300), 4, 32
Rows = list[torch.Tensor]


class Columns(torch.nn.Module):
    """One table per column, and a second one of width 1, as factorization machines have them."""

    def __init__(self, use: Callable[[Rows], torch.Tensor], is_computed: bool = True) -> None:
        super().__init__()
        self.wide = torch.nn.ModuleList(torch.nn.Embedding(size, DIM, sparse=True) for size in SIZES)
        self.narrow = torch.nn.ModuleList(torch.nn.Embedding(size, 1, sparse=True) for size in SIZES)
        self.top = torch.nn.Linear(DIM, 1)
        self.use, self.is_computed = use, is_computed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = [x[:, i].long() if self.is_computed else x[:, i] for i in range(len(SIZES))]
        linear = sum(table(own) for table, own in zip(self.narrow, ids, strict=True))
        out: torch.Tensor = self.top(self.use([table(own) for table, own in zip(self.wide, ids, strict=True)])) + linear
        return out


USES: dict[str, Callable[[Rows], torch.Tensor]] = {
    "all": lambda rows: torch.stack(rows).prod(0),
    "one is not used": lambda rows: rows[0] * rows[1] + rows[2],
    "one is expanded": lambda rows: rows[0].sum(0, keepdim=True).expand(NUM_SAMPLES, DIM) + rows[1] * rows[2] * rows[3],
    "one is changed in place": lambda rows: rows[0].mul_(2) + rows[1] * rows[2] * rows[3],
    "one is detached": lambda rows: rows[0].detach() * rows[1] + rows[2] + rows[3],
}


def batches(dtype: torch.dtype) -> Rows:
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, size, (6, NUM_SAMPLES)) for size in SIZES]
    return list(torch.from_numpy(np.stack(columns, axis=2)).to(dtype))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Rows) -> list[float]:
    losses = []
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def num_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tables of every group that was looked up."""
    found: list[int] = []
    looked_up = GroupedRows.looked_up

    def noted(self: GroupedRows) -> object:
        found.append(len(self.tables))
        return looked_up(self)

    monkeypatch.setattr(GroupedRows, "looked_up", noted)
    return found


@each_of("mode", ["sync", "half_async"])
@each_of("num_servers", [1, 2])
@each_of("use", list(USES))
def test_a_model_of_many_tables_learns_what_torch_learns(
    use: str, num_servers: int, mode: str, num_groups: list[int]
) -> None:
    torch.manual_seed(0)
    model = Columns(USES[use])
    plain, loader = copy.deepcopy(model), batches(torch.float32)
    expected = train(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1), loader)
    with one_worker(model, fleet_optimizer("adagrad", lr=0.1), num_servers=num_servers, mode=mode) as part:
        losses = train(part.model, part.optimizer, loader)
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in part.model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert num_groups[-2:] == [len(SIZES)] * 2


def test_ids_that_lie_in_the_batch_are_grouped_too(num_groups: list[int]) -> None:
    torch.manual_seed(0)
    model = Columns(USES["all"], is_computed=False)
    plain, loader = copy.deepcopy(model), batches(torch.int64)
    expected = train(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1), loader)
    with one_worker(model, fleet_optimizer("adagrad", lr=0.1)) as part:
        assert train(part.model, part.optimizer, loader) == pytest.approx(expected, rel=1e-5)
    assert num_groups[-2:] == [len(SIZES)] * 2


def test_frozen_tables_and_tables_in_eval_mode_keep_their_rows(num_groups: list[int]) -> None:
    torch.manual_seed(0)
    model = Columns(USES["all"])
    model.wide[0].weight.requires_grad_(False)
    plain, loader = copy.deepcopy(model), batches(torch.float32)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    expected = train(plain, torch.optim.Adagrad(trained, lr=0.1), loader)
    with one_worker(model, fleet_optimizer("adagrad", lr=0.1)) as part:
        assert train(part.model, part.optimizer, loader) == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(part.model.state_dict()["wide.0.weight"], plain.wide[0].weight)
    assert sorted(num_groups[-2:]) == [len(SIZES) - 1, len(SIZES)]


def assert_trains_as_torch(
    backward: Callable[[Any, torch.Tensor], None], kind: type[torch.optim.Optimizer], num_servers: int = 1
) -> None:
    """Steps of a model of columns, whose gradients `backward` makes from a batch, end as those of plain torch."""
    torch.manual_seed(0)
    model = Columns(USES["all"])
    plain, loader = copy.deepcopy(model), batches(torch.float32)

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x in loader:
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()

    steps(plain, kind(plain.parameters(), lr=0.1))  # type: ignore[call-arg]
    with one_worker(model, fleet_optimizer(kind.__name__.lower(), lr=0.1), num_servers=num_servers) as part:
        steps(part.model, part.optimizer)
        for name, value in part.model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_two_backward_passes_through_one_call_add_up(num_groups: list[int]) -> None:
    def backward(model: Any, x: torch.Tensor) -> None:
        out = model(x)
        out[::2].square().mean().backward(retain_graph=True)
        out[1::2].mean().backward()

    assert_trains_as_torch(backward, torch.optim.Adagrad)
    assert num_groups


class Wandering(Columns):
    """Looks up ids that no batch has, another one each time, in the table of the first column before that."""

    def __init__(self) -> None:
        super().__init__(USES["all"])
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        own = torch.tensor([self.num_calls % SIZES[1]])
        return super().forward(x) + self.wide[1](own).sum() if self.num_calls % 2 else self.early(x, own)

    def early(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        first = self.wide[1](own).sum()
        return super().forward(x) + first


def test_rows_that_other_lookups_add_to_a_table_do_not_move_those_of_the_group() -> None:
    torch.manual_seed(0)
    model = Wandering()
    plain, loader = copy.deepcopy(model), 3 * batches(torch.float32)
    expected = train(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1), loader)
    with one_worker(model, fleet_optimizer("adagrad", lr=0.1)) as part:
        assert train(part.model, part.optimizer, loader) == pytest.approx(expected, rel=1e-5)
        for name, value in part.model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_distinct_keys_of_parts_are_those_of_each_part() -> None:
    rng = np.random.default_rng(1)
    parts: list[Keys] = [rng.integers(0, high, num).astype(np.uint64) for high, num in ((3, 50), (2**63, 7), (90, 64))]
    found = DistinctParts.of(parts, (3, None, 90))
    assert found.are_below
    first = 0
    for number, (ids, start, stop, end) in enumerate(
        zip(parts, found.starts, found.starts[1:], found.firsts[1:], strict=False)
    ):
        own = found.keys[start:stop]
        assert sorted(own.tolist()) == np.unique(ids).tolist(), number
        np.testing.assert_array_equal(found.keys[found.index[first:end]], ids)
        np.testing.assert_array_equal(own[found.own[first:end]], ids)
        first = end
    assert not DistinctParts.of(parts, (2, None, 90)).are_below


@each_of("num_servers", [1, 2])
def test_gradients_of_a_group_may_be_scaled_before_the_step(num_servers: int, num_groups: list[int]) -> None:
    def backward(model: Any, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        for table in (model.wide[1], model.narrow[2]):
            table.weight.grad.mul_(0.25)

    assert_trains_as_torch(backward, torch.optim.SGD, num_servers)
    assert num_groups[-2:] == [len(SIZES)] * 2


def test_rows_of_a_batch_are_those_of_the_group(num_groups: list[int]) -> None:
    torch.manual_seed(0)
    model = Columns(USES["all"])
    plain, loader = copy.deepcopy(model), batches(torch.float32)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in loader:
        theirs.zero_grad()
        term = plain.wide[1](x[:, 1].long().unique()).square().sum()
        (plain(x).square().mean() + term).backward()
        theirs.step()
    with one_worker(model, fleet_optimizer("sgd", lr=0.1)) as part:
        for x in loader:
            part.optimizer.zero_grad()
            loss = part.model(x).square().mean()
            (loss + part.model.wide[1].batch_rows().square().sum()).backward()
            part.optimizer.step()
        for name, value in part.model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert num_groups[-2:] == [len(SIZES)] * 2


def test_a_table_that_leaves_the_group_takes_its_rows_and_gradients_along() -> None:
    """One of two optimizers ends the step of its own tables; those of the other go on."""
    own, rng = ThreadState(), np.random.default_rng(2)
    layers = [torch.nn.Embedding(size, DIM) for size in SIZES]
    tables = [f"table {number}" for number in range(len(SIZES))]
    ids = [rng.integers(0, size, NUM_SAMPLES).astype(np.uint64) for size in SIZES]
    parts = DistinctParts.of(ids, SIZES)
    ways = [Way(table, Recipe(Input("batch", Window())), None) for table in tables]

    def new_rows(table: str) -> BatchRows:
        return BatchRows(DIM, lambda rows: own.pending.append((table, rows)))

    for layer in layers:
        layer.dim = DIM  # type: ignore[assignment]
    group = GroupedRows(ways, layers, parts, new_rows, own.pending)  # type: ignore[arg-type]
    group.receive([np.zeros((len(keys), DIM), np.float32) for _, keys in group.keys_by_table()], [[1.0]] * len(tables))
    grads = [torch.from_numpy(rng.normal(size=(NUM_SAMPLES, DIM)).astype(np.float32)) for _ in tables]
    group.add(grads)
    for taken in (tables[:1], tables[1:]):
        found, versions = own.gradients(taken, ())
        assert list(found) == list(versions) == taken
        for table, (keys, sums) in found.items():
            number = tables.index(table)
            expected = np.zeros((SIZES[number], DIM))
            np.add.at(expected, ids[number].astype(np.int64), grads[number].numpy().astype(np.float64))
            np.testing.assert_allclose(sums, expected[keys.astype(np.int64)], rtol=1e-4, atol=1e-5)
        own.end_step(taken)
    assert not own.pending


def test_ids_are_compared_where_they_lie() -> None:
    keys = np.arange(3, 20, dtype=np.uint64)
    ids = torch.arange(5, 9)
    assert are_keys_at(ids.data_ptr(), keys, 2, 6)
    assert not are_keys_at(ids.data_ptr(), keys, 1, 5)
    ids[-1] += 1
    assert not are_keys_at(ids.data_ptr(), keys, 2, 6)
