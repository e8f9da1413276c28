"""The weight of a sparse embedding as torch sees it: a parameter to its machinery, gradients that are pushed, rows of
the batch for terms of a loss, and an error wherever it would be computed with."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Net, assert_equal_values, loss_of, one_worker, worker_batches
from support.messages import naming
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.row_state.row_weight import RowWeight

TOLERANCE = 1e-6


def dense_twin(model: Net) -> Net:
    """The same model with ordinary gradients: torch clips no sparse ones."""
    twin = copy.deepcopy(model)
    twin.items.sparse = twin.words.sparse = twin.tags.sparse = False
    return twin


def values(part: jobs.Part) -> dict[str, torch.Tensor]:
    dense = {name: p.detach().clone() for name, p in part.model.named_parameters() if len(p)}
    return {**dense, **{name: part.rows(name, range(num)) for name, num in jobs.TABLES.items()}}


def plain_values(model: Net) -> dict[str, torch.Tensor]:
    tables = {f"{name}.weight": name for name in jobs.TABLES}
    return {tables.get(name, name): p.detach() for name, p in model.named_parameters()}


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "square": torch.square,
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "mul": lambda w: 2 * w,
    "linear": lambda w: F.linear(torch.ones(3, 4), w),
    "matmul": lambda w: torch.ones(3, 4) @ w.T,
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "getitem": lambda w: w[torch.tensor([1, 2])],
    "cat": lambda w: torch.cat([w, w]),
    "to": lambda w: w.to("cpu", torch.float64).sum(),
    "tolist": lambda w: w.tolist(),
    "init": torch.nn.init.xavier_normal_,
    "data": lambda w: setattr(w, "data", torch.ones(40, 4)),
    "stack": lambda w: torch.stack([torch.ones(0, 4), w]),
    "hook": lambda w: w.register_hook(print),
}


@each_of("use", USES)
def test_computing_with_the_weight_is_an_error_that_names_it_and_the_way_out(use: str) -> None:
    with one_worker(Net()) as part:
        with pytest.raises(ModelError, match=naming("'items.weight'", "'items'")) as found:
            USES[use](part.model.items.weight)
        ways = (
            (".grad after backward",) if use == "hook" else ("items.batch_rows()", "row_weight_decay", "sparse=False")
        )
        assert all(way in str(found.value) for way in ways)


def test_torchs_machinery_treats_it_as_a_parameter() -> None:
    with one_worker(Net()) as part:
        model, weight = part.model, part.model.items.weight
        assert isinstance(weight, torch.nn.Parameter)
        assert (tuple(weight.shape), weight.numel(), weight.dim(), len(weight)) == ((0, 4), 0, 2, 0)
        assert "items" in repr(weight)
        assert "items.weight" in dict(model.named_parameters())
        assert model.to("cpu").float() is model
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 18 * 6 + 6 + 6 + 1
        for make in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
            make(model.parameters(), lr=0.1).zero_grad()
        torch.optim.SparseAdam([weight])
        assert isinstance(copy.deepcopy(weight), RowWeight)
        kept = io.BytesIO()
        torch.save(weight, kept)
        kept.seek(0)
        assert torch.load(kept, weights_only=True).shape == (0, 4)
        weight.requires_grad_(False).requires_grad_(True)
        model.zero_grad()


@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_clipping_acts_on_rows_as_on_a_dense_embedding(kind: str, num_batches: int) -> None:
    """Over several backward passes before a step, too."""
    torch.manual_seed(0)
    model = Net()
    plain = dense_twin(model)

    def clip(parameters: Any) -> float:
        if kind == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.01)
            return 0.0
        return torch.nn.utils.clip_grad_norm_(parameters, 0.05).item()

    def loop(model: torch.nn.Module, optimizer: Any) -> list[float]:
        norms, batches = [], iter(worker_batches(0, 4 * num_batches))
        for _ in range(4):
            for _ in range(num_batches):
                loss_of(model, next(batches)).backward()
            norms.append(clip(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    expected = loop(plain, jobs.sgd(plain))
    with one_worker(model, num_servers=2) as part:
        assert loop(part.model, part.optimizer) == pytest.approx(expected, rel=1e-5)
        assert_equal_values(values(part), plain_values(plain), TOLERANCE)


def test_grad_is_what_waits_for_the_step_and_none_drops_it() -> None:
    with one_worker(Net()) as part:
        weight = part.model.items.weight
        assert weight.grad is None
        before = values(part)
        loss_of(part.model, jobs.make_batch(0)).backward()
        assert weight.grad.shape[1] == 4
        assert weight.grad.abs().sum() > 0
        weight.grad = 2 * weight.grad
        with pytest.raises(ModelError, match=naming("(1, 4)")):
            weight.grad = torch.ones(1, 4)
        part.model.zero_grad()
        assert weight.grad is None
        part.optimizer.step()
        assert_equal_values(values(part), before)


def test_gradients_of_a_table_that_several_modules_share_count_once() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (fleet.nn.SparseEmbedding(2, name="both", num_embeddings=9) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.left(ids) + 2 * self.right(ids + 1)).sum()

    with one_worker(Shared()) as part:
        part.model(torch.tensor([1, 2])).backward()
        shown = [p.grad for p in part.model.parameters() if p.grad is not None]
        assert len(shown) == 1
        assert sorted(shown[0][:, 0].tolist()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("mode", "num_workers"), [("sync", 1), ("sync", 2), ("half_async", 1)])
def test_a_term_on_the_rows_of_the_batch_is_that_of_torch_on_the_unique_ids(mode: str, num_workers: int) -> None:
    def loss(model: torch.nn.Module, batch: jobs.Batch, items: Callable[[], torch.Tensor]) -> torch.Tensor:
        return loss_of(model, batch) + 0.1 * items().square().sum() / len(batch["y"])

    def train(part: jobs.Part) -> None:
        for batch in worker_batches(part.index, 5):
            loss(part.model, batch, part.model.items.batch_rows).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    done = jobs.run(train, Net, jobs.sgd, mode=mode, num_workers=num_workers, num_servers=2)
    torch.manual_seed(0)
    plain = Net()
    optimizer = jobs.sgd(plain)
    for batches in zip(*(worker_batches(i, 5) for i in range(num_workers)), strict=True):
        for batch in batches:  # the mean over workers, as sync training makes it
            ids = batch["items"].unique()
            ids = ids[ids != 0]  # padding has no row
            (loss(plain, batch, lambda ids=ids: plain.items.weight[ids]) / num_workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_values(done.values(**jobs.TABLES), jobs.values_of(plain), TOLERANCE)


def test_rows_of_the_batch_are_those_of_the_last_call_and_must_have_been_looked_up() -> None:
    with one_worker(Net()) as part:
        items = part.model.items
        with pytest.raises(ModelError, match=naming("'items'")):
            items.batch_rows()
        for seed in range(2):  # two batches before a step
            batch = jobs.make_batch(seed)
            out = part.model(batch)
            ids = batch["items"].unique()
            assert torch.equal(items.batch_rows().sort(0)[0], part.rows("items", ids[ids != 0]).sort(0)[0])
            out.sum().backward()
        part.model.eval()
        with torch.no_grad():
            part.model(jobs.make_batch(3))
            assert items.batch_rows().shape == (0, 4)


def test_an_optimizer_and_lists_of_weights_made_before_hold_the_stand_in() -> None:
    """What deepctr-torch does: it keeps the parameters that it regularises in a list of its own."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    weights, optimizer = [model.items.weight], torch.optim.Adagrad(model.parameters(), lr=0.1)
    with one_worker(model, lambda _: optimizer) as part:
        assert weights[0] is part.model.items.weight
        with pytest.raises(ModelError, match=naming("'items.weight'", "l2_reg_embedding=0", "l2_reg_linear=0")):
            sum(torch.sum(1e-5 * torch.square(weight)) for weight in weights)
        assert weights[0] not in optimizer.state  # its sums are with the servers
        for batch in worker_batches(0, 3):
            part.step(batch)
        found = values(part)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for batch in worker_batches(0, 3):
        jobs.plain_step(plain, [theirs], batch)
    assert_equal_values(found, jobs.values_of(plain), TOLERANCE)


def test_a_weight_that_is_no_plain_parameter_is_refused() -> None:
    model = Net()
    torch.nn.utils.parametrizations.weight_norm(model.items)
    with pytest.raises(ModelError, match=naming("'items.weight'", "Tensor", "sparse=False")):
        fleet.nn.convert(model)


def shown(ids: list[int]) -> jobs.Batch:
    return {"ids": torch.tensor(ids), "show": torch.ones(len(ids)), "click": torch.zeros(len(ids))}


@pytest.mark.parametrize("is_read", [False, True])
def test_shows_and_clicks_behind_gradients_stay_what_they_are_when_grad_is_read(is_read: bool) -> None:
    """Of two batches before a step, and of lookups in eval mode, which come without shows."""

    class Shown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            entry = fleet.ShowClickEntry("show", "click")
            self.one, self.two = (fleet.nn.SparseEmbedding(2, name="rows", entry=entry) for _ in range(2))

        def forward(self, batch: jobs.Batch) -> torch.Tensor:
            return self.one(batch["ids"]).sum() + 10 * self.two(batch["ids"]).sum()

    servers = jobs.Servers()
    with one_worker(Shown(), mode="half_async", servers=servers) as part:
        part.model(shown([1, 2, 3])).sum().backward()
        part.optimizer.step()  # all ids have rows
        part.optimizer.zero_grad()
        before = part.rows("rows", [1, 2, 3])
        for ids in ([1, 2], [2, 3]):
            part.model.two.train(ids == [1, 2])
            part.model(shown(ids)).backward()
            if is_read:
                part.model.one.weight.grad.mul_(2.0)
        part.optimizer.step()
        moved = before - part.rows("rows", [1, 2, 3])
        ((keys, _, columns),) = servers.table("rows").chunks(9)
    once, twice = (2.0, 4.0) if is_read else (1.0, 1.0)  # the first batch was doubled with the second
    torch.testing.assert_close(moved[:, 0], 0.5 * 11 * torch.tensor([twice, twice + once, once]))
    shows = dict(zip(keys.tolist(), columns["show"].tolist(), strict=True))
    assert shows == {1: 2 + 2, 2: 2 + 2 + 1, 3: 2 + 1}
