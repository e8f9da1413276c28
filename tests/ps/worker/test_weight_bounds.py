"""SparseEmbedding(weight_bounds=...): plain torch that clamps a batch's rows after each update; what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Part, assert_equal_values
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest

TOLERANCE = 1e-6
STEPS = 10
BOUNDS = (-0.06, 0.04)  # the first values, up to 0.05 from zero, begin on both sides of the upper one
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "adam": {"lr": 0.02, "eps": 1e-4},
}


class Bounded(torch.nn.Module):
    """One table with bounds and one without, added up."""

    def __init__(self, bounds: Any = BOUNDS) -> None:
        super().__init__()
        self.items = fleet.nn.SparseEmbedding(4, weight_bounds=bounds)
        self.free = fleet.nn.SparseEmbedding(4, seed=1)

    def forward(self, batch: jobs.Batch) -> torch.Tensor:
        ids = batch["items"]
        return (self.items(ids) + self.free(ids)).sum(dim=(1, 2))


class Plain(Bounded):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.free = (torch.nn.Embedding(jobs.NUM_ITEMS, 4, sparse=True) for _ in range(2))


def settled_steps(part: Part) -> None:
    """Every update is with the servers before the next batch is looked up."""
    for batch in jobs.worker_batches(part.index, STEPS):
        part.step(batch)
        part.flush()


def plain_values(rule: str, first: dict[str, torch.Tensor], num_workers: int) -> dict[str, torch.Tensor]:
    """The same in torch, on the combined batches; the rows that an update touched are clamped behind it."""
    model = Plain()
    with torch.no_grad():
        model.items.weight.copy_(first["items"])
        model.free.weight.copy_(first["free"])
    optimizers = jobs.plain_optimizers(rule, model, **RULES[rule])
    seen: set[int] = set()
    for batches in zip(*(jobs.worker_batches(i, STEPS) for i in range(num_workers)), strict=True):
        batch = jobs.combined(batches)
        jobs.plain_step(model, optimizers, batch)
        touched = batch["items"].unique()
        with torch.no_grad():
            model.items.weight[touched] = model.items.weight[touched].clamp(*BOUNDS)
        seen.update(touched.tolist())
    with torch.no_grad():
        for table in (model.items, model.free):  # ids that never appeared have no row, and read as zeros
            table.weight[[i for i in range(jobs.NUM_ITEMS) if i not in seen]] = 0
    return jobs.values_of(model)


@each_of("rule", RULES)
@each_of(("mode", "num_workers"), [("sync", 1), ("sync", 2), ("half_async", 1), ("async", 1)])
def test_training_equals_torch_that_clamps_after_each_update(rule: str, mode: str, num_workers: int) -> None:
    optimizer = jobs.fleet_optimizer(rule, **RULES[rule])
    done = jobs.run(settled_steps, Bounded, optimizer, mode=mode, num_workers=num_workers, num_servers=2)
    first = {name: jobs.first_rows(done.parts[0], name, range(jobs.NUM_ITEMS)) for name in ("items", "free")}
    found = done.values(items=jobs.NUM_ITEMS, free=jobs.NUM_ITEMS)
    assert_equal_values(found, plain_values(rule, first, num_workers), TOLERANCE)
    assert found["items"].min() == np.float32(BOUNDS[0])  # the bounds were reached,
    assert found["items"].max() == np.float32(BOUNDS[1])
    assert found["free"].abs().max() > 0.07  # and are one table's only


@pytest.mark.parametrize("bounds", [(-0.5, math.inf), (-math.inf, 0.5), [-1, 1]])
def test_one_bound_may_be_infinite_and_whole_numbers_will_do(bounds: Any) -> None:
    module = fleet.nn.SparseEmbedding(2, weight_bounds=bounds)
    assert module.weight_bounds == tuple(bounds)
    assert f"weight_bounds=({float(bounds[0])}, {float(bounds[1])})" in repr(module)


@each_of(
    ("bounds", "message"),
    [
        ((1.0, 1.0), "weight_bounds low high float32 (1.0, 1.0)"),
        ((2.0, 1.0), "low high"),
        ((math.nan, 1.0), "low high"),
        ((math.inf, math.inf), "low high"),
        (0.5, "weight_bounds=(low, high) 0.5"),
        ((1.0,), "(low, high)"),
        ((-1.0, 0.0, 1.0), "(low, high)"),
        (("-1", "1"), "(low, high)"),
        ((False, True), "(low, high)"),
        ((-1e-60, 1e-60), "low high float32"),
    ],
    ids=str,
)
def test_bounds_that_are_not_two_ascending_numbers_are_refused(bounds: Any, message: str) -> None:
    with pytest.raises(ModelError, match=naming(*message.split())):
        fleet.nn.SparseEmbedding(2, weight_bounds=bounds)


def test_embeddings_that_share_a_table_must_agree_on_its_bounds() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = fleet.nn.SparseEmbedding(2, name="both", weight_bounds=(-1.0, 1.0))
            self.right = fleet.nn.SparseEmbedding(2, name="both")

    with pytest.raises(ModelError, match=naming("'both'", "weight_bounds")):
        fleet.nn.sparse_embeddings(Shared())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_geo_training_refuses_bounds(num_workers: int) -> None:
    """The servers add differences, and what several workers add up to is bounded by none of them."""
    with pytest.raises(StrategyError, match=naming("'items'", "weight_bounds", "geo", "sync", "half_async", "async")):
        jobs.run(settled_steps, Bounded, jobs.sgd, mode="geo", num_workers=num_workers)


def test_whole_tables_refuse_bounds() -> None:
    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = fleet.nn.SparseEmbedding(2, num_embeddings=5, weight_bounds=(-1.0, 1.0))

    with jobs.clean_facade():
        fleet.init()
        model = fleet.distributed_model(Whole())
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker()
        with pytest.raises(ModelError, match=naming("'items'", "weight_bounds")):
            fleet.whole_tables()


@pytest.mark.parametrize("num_embeddings", [None, jobs.NUM_ITEMS], ids=["any_id", "declared_ids"])
def test_bounds_are_described_saved_and_act_after_loading(tmp_path: Path, num_embeddings: int | None) -> None:
    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = fleet.nn.SparseEmbedding(2, num_embeddings=num_embeddings, weight_bounds=(-0.5, 0.25))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.items(ids)

    def train(folder: str | None) -> torch.Tensor:
        with jobs.clean_facade():
            fleet.init()
            model = fleet.distributed_model(One())
            optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
            fleet.init_worker(folder)
            assert "bounds=(-0.5, 0.25)" in fleet.describe()
            model(torch.arange(4)).sum().mul(-1.0 if folder is None else 1.0).backward()
            optimizer.step()
            fleet.save_persistables(str(tmp_path))
            values = model(torch.arange(4)).detach()
            fleet.stop_worker()
        return values

    assert (train(None) == 0.25).all()
    rule = read_manifest(Storage(str(tmp_path))).table("items").spec().rule
    assert (rule.low, rule.high) == (-0.5, 0.25)
    assert (train(str(tmp_path)) == -0.5).all()
