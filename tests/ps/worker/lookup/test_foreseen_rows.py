"""Rows of ids that were foreseen, and of ids that are looked up in eval mode: which get rows, and what trains them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import each_of

import torchfleet as fleet

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "half_async": {"a_sync": True, "a_sync_configs": {"half_async": True}},
    "async": {"a_sync": True},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 1}},
}
pytestmark = pytest.mark.slow

FIRST = fleet.nn.Constant(0.5)
RATE = 0.1


@contextlib.contextmanager
def job(model: torch.nn.Module, mode: str = "sync", **group: Any) -> Iterator[tuple[Any, Any]]:
    fleet.init()
    try:
        model = fleet.distributed_model(model)
        optimizer = torch.optim.SGD([{"params": list(model.parameters()), **group}], lr=RATE)
        optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(**MODES[mode]))
        fleet.init_worker()
        yield model, optimizer
    finally:
        fleet.reset()


def step(model: Any, optimizer: Any, *batch: torch.Tensor) -> torch.Tensor:
    out = model(*batch)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    fleet.flush()
    return out.detach()


def ids_of(model: Any, table: str) -> list[int]:
    return sorted(model.state_dict()[f"{table}.keys"].tolist())


class Branch(torch.nn.Module):
    """Looks up the first `num` columns of its ids in `often`, and all of them in `always`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.often = fleet.nn.SparseEmbedding(1, state="rows", initializer=FIRST, **settings)
        self.always = fleet.nn.SparseEmbedding(1, state="rows", initializer=FIRST)
        self.num, self.is_computed = 2, False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.always(ids).sum(1)
        if self.num:
            found = found + self.often(ids[:, : self.num] + 0 if self.is_computed else ids[:, : self.num]).sum(1)
        return found


def batches(num: int) -> torch.Tensor:
    """Batches of two samples with two ids each; no id comes twice."""
    return torch.arange(4 * num).view(num, 2, 2)


@each_of("is_ahead", [False, True])
@each_of("is_computed", [False, True])
@each_of("num_later", [0, 1])
@each_of("mode", list(MODES))
def test_ids_that_are_not_looked_up_get_no_rows(mode: str, num_later: int, is_computed: bool, is_ahead: bool) -> None:
    model = Branch()
    with job(model, mode) as (model, optimizer):
        model.is_computed, expected = is_computed, []
        given = batches(12)
        for number, ids in enumerate(fleet.prefetch(given) if is_ahead else given):
            model.num = 2 if number < 5 else num_later
            step(model, optimizer, ids)
            expected += ids[:, : model.num].reshape(-1).tolist()
        assert ids_of(model, "often") == sorted(expected)
        assert ids_of(model, "always") == given.reshape(-1).tolist()
        left_out = [number for number in given.reshape(-1).tolist() if number not in expected]
        model.eval()
        assert not model.often(torch.tensor(left_out)).any()
        torch.testing.assert_close(model.often(torch.tensor(expected)), torch.full((len(expected), 1), 0.5 - RATE))


@each_of("dtype", ["float32", "bfloat16", "int8"])
@each_of("size", [None, 1000])
def test_foreseen_rows_begin_with_their_first_values(size: int | None, dtype: str) -> None:
    """A foreseen lookup of new ids reads what a pull that creates rows reads."""
    found = []
    for sees_ahead in (False, True):
        torch.manual_seed(0)
        layer = fleet.nn.SparseEmbedding(8, "t", dtype=dtype, num_embeddings=size)
        with job(torch.nn.Sequential(layer)) as (model, optimizer):
            for ids in batches(4) if sees_ahead else ():
                step(model, optimizer, ids)
            found.append(model(torch.arange(100, 120).view(10, 2)).detach())
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_rows_that_were_looked_up_and_are_no_maximum_exist() -> None:
    layer = fleet.nn.SparseEmbeddingBag(1, "t", state="rows", pooling="max")
    with job(torch.nn.Sequential(layer)) as (model, optimizer):
        for ids in batches(6):
            step(model, optimizer, ids)
        assert ids_of(model, "0") == list(range(24))


def test_an_id_that_was_foreseen_and_not_looked_up_is_foreseen_no_more() -> None:
    """So that a table that counts appearances counts no more of them than those of one call."""
    with job(Branch(entry=fleet.CountFilterEntry(2))) as (model, optimizer):
        ids = torch.tensor([[1, 2], [3, 4]])
        for number in range(8):
            model.num = 2 if number == 0 else 0
            step(model, optimizer, ids + 10 * number)
        for number in range(2, 8):  # the second appearance creates a row
            model.num = 2
            step(model, optimizer, ids + 10 * number)
        assert not [found for found in ids_of(model, "often") if found > 20]


class Rare(torch.nn.Module):
    """Parts of the model, looked up by a call of the whole."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(1, state="rows", initializer=FIRST, **settings)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum()


@each_of("sees_ahead", [False, True])
@each_of("kind", ["plain", "admission", "tiers"])
@each_of("mode", list(MODES))
def test_a_step_in_eval_mode_trains_rows_that_exist_and_no_others(
    tmp_path: Path, mode: str, kind: str, sees_ahead: bool
) -> None:
    settings: dict[str, Any] = {
        "plain": {},
        "admission": {"entry": fleet.CountFilterEntry(1)},
        "tiers": {"storage": fleet.Tiered("64MiB", tmp_path / f"{mode} {sees_ahead}")},
    }[kind]
    with job(Rare(**settings), mode) as (model, optimizer):
        for ids in torch.arange(6).view(3, 2) if sees_ahead else torch.arange(2).view(1, 2):
            step(model, optimizer, ids)
        known, num = [0, 1], len(ids_of(model, "rows"))
        model.eval()
        for _ in range(2):
            before = model.rows(torch.tensor([*known, 77]))
            assert before[2].item() == 0.0
            step(model, optimizer, torch.tensor([*known, 77]))
            after = model.rows(torch.tensor([*known, 77])).detach()
            torch.testing.assert_close(after, torch.stack([*(before[:2] - RATE), before[2]]).detach())
        assert len(ids_of(model, "rows")) == num
        model.train()
        assert model.rows(torch.tensor([77])).item() == 0.5


@each_of("mode", ["sync", "half_async", "async"])
@each_of("kind", ["at once", "with training", "read", "pooled"])
def test_a_step_in_eval_mode_trains_rows_of_a_cache_as_those_without_one(mode: str, kind: str) -> None:
    """Id 0 has a row that was evicted, 1 one in the cache, 77 has none, 78 may get one in the same step."""
    found = []
    for cache in (None, "1KB"):
        layer: torch.nn.Module
        layer = fleet.nn.SparseEmbeddingBag(1, "t", initializer=FIRST, state="rows", cache=cache, pooling="mean")
        if kind != "pooled":
            layer = fleet.nn.SparseEmbedding(1, "t", initializer=FIRST, state="rows", cache=cache)
        with job(torch.nn.Sequential(layer), mode) as (model, optimizer):
            seen = []
            for ids in (torch.tensor([0, 1]), *torch.arange(80, 140).view(10, 6), torch.tensor([1])):
                step(model, optimizer, ids[None])
            for _ in range(2):
                if kind == "with training":
                    model(torch.tensor([[78, 79, 1]])).sum().backward()
                model.eval()
                given = torch.tensor([[1, 0, 77, 1, 78]])
                out = model(given)
                seen.append(out.detach())
                out.sum().backward()
                if kind == "read":
                    layer.weight.grad.mul_(0.5)  # type: ignore[union-attr, operator]
                optimizer.step()
                optimizer.zero_grad()
                fleet.flush()
                seen.append(model(given).detach())
                model.train()
            found.append((seen, ids_of(model, "0"), model.state_dict()["0.weight"]))
    assert found[1][1] == found[0][1]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


def test_gradients_that_were_read_in_eval_mode_are_dropped_alike() -> None:
    """Reading .grad joins the gradients of several lookups."""
    with job(Rare()) as (model, optimizer):
        step(model, optimizer, torch.tensor([1]))
        model.eval()
        (model(torch.tensor([1, 77])) + model(torch.tensor([1, 78]))).backward()
        assert model.rows.weight.grad is not None
        model.rows.weight.grad.mul_(2.0)
        optimizer.step()
        fleet.flush()
        assert ids_of(model, "rows") == [1]
        torch.testing.assert_close(model.rows(torch.tensor([1])).detach(), torch.tensor([[0.5 - RATE - 4 * RATE]]))


@each_of("trains_first", [False, True])
@each_of("mode", list(MODES))
def test_rows_first_trained_in_eval_mode_decay(mode: str, trains_first: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Embedding(10, 2, sparse=True)
    expected = layer.weight.detach().clone()
    with job(torch.nn.Sequential(layer), mode, row_weight_decay=0.5) as (model, optimizer):
        for is_training in (trains_first, True, False, True):
            model.train(is_training)
            step(model, optimizer, torch.tensor([1, 2]))
            expected[1:3] -= RATE * (1 + 0.5 * expected[1:3])
            torch.testing.assert_close(model.state_dict()["0.weight"], expected)
