"""Batch norm over ranks equals batch norm of one rank that has all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.collective_oracles import alone, assert_close, job_of, values
from support.messages import naming
from support.ranks import Ranks
from torch import nn

from torchfleet.base.errors import ModelError
from torchfleet.collective.strategies.batch_norm import JointBatchNorm, SyncBatchNorm

CASES: dict[str, dict[str, Any]] = {
    "1d": {"kind": "BatchNorm1d", "shape": []},
    "1d of sequences": {"kind": "BatchNorm1d", "shape": [7]},
    "2d": {"kind": "BatchNorm2d", "shape": [4, 3]},
    "3d": {"kind": "BatchNorm3d", "shape": [2, 3, 2]},
    "cumulative": {"kind": "BatchNorm2d", "shape": [2, 2], "options": {"momentum": None}},
    "no affine": {"kind": "BatchNorm1d", "shape": [], "options": {"affine": False}},
    "no running statistics": {"kind": "BatchNorm1d", "shape": [], "options": {"track_running_stats": False}},
    "far from 0": {"kind": "BatchNorm1d", "shape": [], "shift": 1000.0},
}
ROWS = ([3, 5], [6, 1], [4, 0], [2, 3, 4])


def layer(kind: str, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    made = getattr(nn, kind)(6, **{"eps": 1e-4, **options})
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def samples(rows: list[int], shape: list[int], shift: float, step: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    whole = torch.randn(sum(rows), 6, *shape, generator=made) * torch.arange(1.0, 7.0).view(1, 6, *[1] * len(shape))
    return list((whole + shift).split(rows))


def run(model: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs, and gradients for a loss that weighs every output differently."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    model.zero_grad()
    (outputs * inputs.detach().cos()).sum().backward()
    found = {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"outputs": outputs.detach(), "inputs": inputs.grad, **found}


def run_on_ranks(rows: list[int]) -> dict[str, Any]:
    """All cases, two steps of each, then an evaluation."""
    job = job_of(sync_batch_norm=True)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        strategy = SyncBatchNorm(job.settings, job.world)
        plain = layer(case["kind"], case.get("options", {}))
        holder = strategy.convert(nn.Sequential(plain))  # not DistributedDataParallel: gradients are this rank's own
        assert type(holder[0]) is JointBatchNorm
        assert list(holder.state_dict()) == [f"0.{key}" for key in plain.state_dict()]
        for step in range(2):
            inputs = samples(rows, case["shape"], case.get("shift", 0.0), step)[job.world.rank]
            results |= {f"{name}.{step}.{key}": value for key, value in run(holder, inputs).items()}
        results |= {f"{name}.{key}": value for key, value in values(holder).items()}
        if inputs.shape[0] > 1:
            results[f"{name}.evaluated"] = holder.eval()(inputs).detach()
    return results


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_ranks_equal_one_rank_with_all_samples(ranks: Ranks, rows: list[int]) -> None:
    found = ranks.run(run_on_ranks, len(rows), rows=rows)
    for name, case in CASES.items():
        # float32; a mean of 1000 leaves four digits less
        close = {"rtol": 1e-4, "atol": 1e-3 if case.get("shift") else 2e-5}
        plain = nn.Sequential(layer(case["kind"], case.get("options", {})))
        for step in range(2):
            inputs = samples(rows, case["shape"], case.get("shift", 0.0), step)
            expected = run(plain, torch.cat(inputs))
            for key in ("outputs", "inputs"):
                joined = torch.cat([result[f"{name}.{step}.{key}"] for result in found])
                torch.testing.assert_close(joined, expected[key], **close, msg=lambda text, n=name: f"{n}: {text}")
            for key in expected.keys() - {"outputs", "inputs"}:
                summed = torch.stack([result[f"{name}.{step}.{key}"] for result in found]).sum(0)
                torch.testing.assert_close(summed, expected[key], **close, msg=lambda text, n=name: f"{n}: {text}")
        for result in found:
            for key, value in values(plain).items():
                torch.testing.assert_close(result[f"{name}.{key}"], value, rtol=1e-5, atol=1e-5)
        plain.eval()
        for rank, result in enumerate(found):
            if rows[rank] > 1:
                torch.testing.assert_close(result[f"{name}.evaluated"], plain(inputs[rank]).detach(), **close)


def train_on_ranks() -> dict[str, Any]:
    job = job_of(sync_batch_norm=True)
    model = job.distribute_model(network())
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model(samples([4, 4], [5], 0.0, step)[job.world.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(6, 8, 3), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), nn.Conv1d(8, 1, 2))


def test_a_network_trains_as_on_one_rank(ranks: Ranks) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.cat(samples([4, 4], [5], 0.0, step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(train_on_ranks, 2):
        assert_close(found, values(model), atol=1e-5)


def test_one_rank_keeps_plain_layers() -> None:
    model = network()
    assert SyncBatchNorm(*alone(sync_batch_norm=True)).convert(model) is model
    assert type(model[1][0]) is nn.BatchNorm1d


def test_layers_that_add_something_of_their_own_are_refused() -> None:
    class WithActivation(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with pytest.raises(ModelError, match=naming(0, "WithActivation")):
        SyncBatchNorm(*alone(sync_batch_norm=True)).convert(nn.Sequential(WithActivation(3)))
