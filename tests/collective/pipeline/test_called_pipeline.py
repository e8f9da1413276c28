"""A pipeline in an ordinary loop: a model that returns its loss is called, against the same loop in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks, export_once
from torch import nn

import torchfleet as fleet
from torchfleet.base.errors import ModelError

pytestmark = [pytest.mark.xdist_group("traced"), pytest.mark.slow]
prepare_ranks = export_once

ROWS, DIM = 8, 6


class Net(nn.Module):
    """Returns its loss, and if `is_pair` its outputs behind it."""

    def __init__(self, is_pair: bool = False) -> None:
        super().__init__()
        self.is_pair = is_pair
        self.first, self.norm = nn.Linear(DIM, 9), nn.LayerNorm(9)
        self.second, self.head = nn.Linear(9, DIM), nn.Linear(DIM, 3)

    def forward(self, rows: torch.Tensor, target: torch.Tensor) -> Any:
        outputs = self.head(self.second(self.norm(self.first(rows).tanh())).tanh())
        loss = (outputs - target).square().mean()
        return (loss, outputs) if self.is_pair else loss


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(index)
    return torch.randn(ROWS, DIM, generator=drawn), torch.randn(ROWS, 3, generator=drawn)


def made(is_pair: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(is_pair)


def loop(model: Any, optimizer: Any, replica: int = 0) -> dict[str, Any]:
    """The loop of any script; the second batch is given by names."""
    losses = []
    for step in range(3):
        rows, target = batch(step + 10 * replica)
        found = model(rows, target=target) if step == 1 else model(rows, target)
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        found = model(*batch(9))
    return {"losses": torch.tensor([*losses, float(found[0] if isinstance(found, tuple) else found)])}


def train_each(cases: list[list[Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (is_pair, fields) in enumerate(cases):
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, **fields))
        model = fleet.distributed_model(made(is_pair))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        result = loop(model, optimizer, fleet.data_shard()[0])
        found[str(number)] = {**result, **{name: value.detach() for name, value in model.state_dict().items()}}
        fleet.stop_worker()
    return found


def alone() -> dict[str, Any]:
    model = made()
    found = loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return {**found, **model.state_dict()}


def configs(**more: Any) -> dict[str, Any]:
    return {"pipeline_configs": {"accumulate_steps": 4, "stages": ["second"], **more}}


def test_an_ordinary_loop_trains_a_pipeline(ranks: Ranks) -> None:
    again = {"recompute": True, "recompute_configs": {"checkpoints": ["second"]}}
    cases = [[False, configs()], [True, {**configs(schedule_mode="F-then-B"), **again}]]
    expected = alone()
    results = ranks.run(train_each, 2, cases=cases)
    for number in range(len(cases)):
        first, second = results[0][str(number)], results[1][str(number)]
        assert not {*first} & {*second} - {"losses"}
        for found in (first, second):  # every rank has the losses
            torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-6, atol=1e-6)
        for name, value in {**first, **second}.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    (one,) = ranks.run(train_each, 1, cases=cases[:1])
    for name, value in one["0"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


def counted() -> dict[str, Any]:
    """The numbers of samples behind each call: evaluation with gradients, training, evaluation."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True))
    model = fleet.distributed_model(made())
    found = []
    for is_training in (False, True, False):
        model.train(is_training)
        model(*batch(0))
        found.append(model.num_samples)
    fleet.stop_worker()
    return {"counted": found}


def test_evaluation_with_gradients_is_not_counted(ranks: Ranks) -> None:
    (found,) = ranks.run(counted, 1)
    assert found["counted"] == [0, ROWS, ROWS]


def mistakes() -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, **configs()))
    model = fleet.distributed_model(made())
    try:
        (model(*batch(0)) * 0.5).backward()
    except ModelError as error:
        text = str(error)
    dist.barrier()
    fleet.stop_worker()
    return {"scaled": text}


def returns_rows() -> dict[str, Any]:
    """One rank: a pipeline of one stage."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True))
    model = fleet.distributed_model(nn.Linear(DIM, 3))
    try:
        model(batch(0)[0])
    except ModelError as error:
        text = str(error)
    fleet.stop_worker()
    return {"text": text}


def test_losses_that_cannot_be_are_named(ranks: Ranks) -> None:
    for found in ranks.run(mistakes, 2):
        assert "0.5" in found["scaled"]
        assert "gradient_merge" in found["scaled"]
    assert "(8, 3)" in ranks.run(returns_rows, 1)[0]["text"]
