"""'row_weight_decay' in a param group: torch with the decay in the gradients of the rows that a step touches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Net, Part, assert_equal_values, worker_batches
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import ModelError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest

TOLERANCE = 1e-6
STEPS = 8
DECAY = 0.3
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "adam": {"lr": 0.02, "eps": 1e-4},
}
KINDS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def make(rule: str) -> jobs.MakeOptimizer:
    """The network decays at a rate of its own, which rows leave alone."""

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": list(model.parameters()), "row_weight_decay": DECAY}]
        return KINDS[rule](groups, weight_decay=0.05, **RULES[rule])

    return optimizer


def steps(part: Part) -> None:
    for batch in worker_batches(part.index, STEPS):
        part.step(batch)
        part.flush()


def plain_values(rule: str, num_workers: int = 1, is_decoupled: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    dense, sparse = jobs.split_parameters(model)
    kind = torch.optim.AdamW if is_decoupled else KINDS[rule]
    rows = torch.optim.SparseAdam if rule == "adam" else KINDS[rule]
    optimizers = [kind(dense, weight_decay=0.05, **RULES[rule]), rows(sparse, **RULES[rule])]
    for batches in zip(*(worker_batches(i, STEPS) for i in range(num_workers)), strict=True):
        jobs.loss_of(model, jobs.combined(batches)).backward()
        with torch.no_grad():
            for weight in sparse:
                grad = weight.grad.coalesce()
                ids, values = grad.indices()[0], grad.values()
                if weight is model.items.weight:  # padding has no row
                    ids, values = ids[ids != 0], values[ids != 0]
                if is_decoupled:
                    weight[ids] *= 1 - RULES[rule]["lr"] * DECAY
                else:
                    values = values + DECAY * weight[ids]
                weight.grad = torch.sparse_coo_tensor(ids[None], values, weight.shape)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return jobs.values_of(model)


@each_of("rule", RULES)
@each_of(("mode", "num_workers"), [("sync", 1), ("sync", 2), ("async", 1)])
def test_rows_that_a_step_touches_decay_as_in_torch(rule: str, mode: str, num_workers: int) -> None:
    done = jobs.run(steps, Net, make(rule), mode=mode, num_workers=num_workers, num_servers=2)
    assert_equal_values(done.values(**jobs.TABLES), plain_values(rule, num_workers), TOLERANCE)


@pytest.mark.parametrize("mode", ["geo", "hybrid"])
def test_decay_acts_where_rows_are_trained_in_geo_and_hybrid_too(mode: str) -> None:
    done = jobs.run(steps, Net, make("sgd"), mode=mode)
    assert_equal_values(done.values(**jobs.TABLES), plain_values("sgd"), 1e-5)


def test_with_adamw_the_decay_is_decoupled() -> None:
    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": list(model.parameters()), "row_weight_decay": DECAY}]
        return torch.optim.AdamW(groups, weight_decay=0.05, **RULES["adam"])

    done = jobs.run(steps, Net, optimizer, num_servers=2)
    assert_equal_values(done.values(**jobs.TABLES), plain_values("adam", is_decoupled=True), TOLERANCE)


@each_of("decay", [-1.0, "0.1", float("nan"), True, None])
def test_a_decay_that_is_no_number_above_zero_is_refused(decay: Any) -> None:
    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "row_weight_decay": decay}], lr=0.1)

    with pytest.raises(ModelError, match=naming("row_weight_decay=", 0)):
        jobs.one_worker(Net(), optimizer).__enter__()


def test_decay_is_described_saved_and_may_not_change(tmp_path: Path) -> None:
    with jobs.clean_facade():
        fleet.init()
        model = fleet.distributed_model(Net())
        optimizer = fleet.distributed_optimizer(make("adagrad")(model))
        fleet.init_worker()
        assert "weight_decay=0.3" in fleet.describe()
        jobs.plain_step(model, [optimizer], jobs.make_batch(0))
        fleet.save_persistables(str(tmp_path))
        optimizer.param_groups[0]["row_weight_decay"] = 0.1
        with pytest.raises(ModelError, match="lr"):
            jobs.plain_step(model, [optimizer], jobs.make_batch(0))
        fleet.stop_worker()
    assert read_manifest(Storage(str(tmp_path))).table("items").spec().rule.weight_decay == 0.3
