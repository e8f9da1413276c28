"""An embedding that is the head's weight too, on two stages: gradients are summed, and both stay one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Ranks, export_once
from support.sharded_models import of_case, start
from torch import nn
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.collective.checkpoint.loading import load_parameters

pytestmark = pytest.mark.xdist_group("traced")
prepare_ranks = export_once

WORDS, DIM, BATCH = 12, 6, 8


class Middle(nn.Module):
    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        if parallel:
            self.up: nn.Module = fleet.nn.ColumnParallelLinear(DIM, 8, gather_output=False)
            self.down: nn.Module = fleet.nn.RowParallelLinear(8, DIM, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


class Chain(nn.Sequential):
    def __init__(self, parallel: bool = False) -> None:
        words = fleet.nn.VocabParallelEmbedding(WORDS, DIM) if parallel else nn.Embedding(WORDS, DIM)
        head = fleet.nn.ColumnParallelLinear(DIM, WORDS) if parallel else nn.Linear(DIM, WORDS)
        head.weight = words.weight
        super().__init__(words, Middle(parallel), Middle(parallel), head)


class Traced(nn.Module):
    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        self.chain = Chain(parallel)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.chain[2](self.chain[1](self.chain[0](ids)))
        return self.chain[3](x)  # type: ignore[no-any-return]


def made(case: dict[str, Any]) -> Any:
    torch.manual_seed(2)
    return Traced(case.get("parallel", False)) if case.get("traced") else Chain(case.get("parallel", False))


def stepping(case: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    if case.get("optimizer") == "adam":
        return torch.optim.Adam(parameters, lr=0.02)
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def batch(step: int, replica: int = 0) -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, 5), generator=torch.Generator().manual_seed(step + 10 * replica))


def loss_of(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), ids.roll(1, 1).flatten())


def train(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{case['name']} {key}": value for case in cases for key, value in train_one(case).items()}


def train_one(case: dict[str, Any]) -> dict[str, Any]:
    """`calls` batches are added up for each of three steps."""
    begins = {True: ["chain.2"], False: ["2"]}[case.get("traced", False)]
    fields = {"pipeline": True, "pipeline_configs": {"accumulate_steps": 2, "stages": case.get("stages", begins)}}
    job = start(**fields, **case.get("fields", {}))
    model = job.distribute_model(made(case))
    optimizer = job.distribute_optimizer(stepping(case, model.parameters()))
    norms = []
    for step in range(3):
        for call in range(case.get("calls", 1)):
            ids = batch(3 * call + step, job.data_shard[0])
            model.train_batch(ids, ids, loss_of)
        if case.get("clip"):
            optimizer.clip_grad_norm_(case["clip"])
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    if "folder" in case:
        job.save(case["folder"], None)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        job.load(case["folder"])
    state = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in model.state_dict().items()
    }
    return {**state, "norms": norms}


def alone(case: dict[str, Any], replicas: int) -> dict[str, Any]:
    model = made({**case, "parallel": False})
    optimizer = stepping(case, model.parameters())
    norms = []
    for step in range(3):
        for call in range(case.get("calls", 1)):
            for replica in range(replicas):
                ids = batch(3 * call + step, replica)
                (loss_of(model(ids), ids) / replicas).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.get("clip", 1e9))))
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "norms": norms}


def check(ranks: Ranks, size: int, cases: list[dict[str, Any]], replicas: dict[str, int]) -> None:
    found = ranks.run(train, size, cases=cases)
    for case in cases:
        expected = alone(case, replicas.get(case["name"], 1))
        seen = set()
        for of_rank in found:
            own = of_case(of_rank, case["name"])
            norms = own.pop("norms")
            if case.get("clip"):
                torch.testing.assert_close(norms, expected["norms"], rtol=1e-5, atol=1e-6)
            for name, value in own.items():
                text = f"{case['name']}, {name}: "
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-5, atol=2e-6, msg=lambda given, text=text: text + given
                )
            seen |= set(own)
        assert seen == set(expected) - {"norms"}, case["name"]


def test_tied_weights_on_two_stages_equal_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """Clipped by the norm of all gradients, in which the copies count once; two batches for a step; traced; saved."""
    folder = str(tmp_path / "saved")
    cases: list[dict[str, Any]] = [
        {"name": "clipped", "clip": 0.5, "folder": folder},
        {"name": "twice", "calls": 2, "optimizer": "adam"},
        {"name": "traced", "traced": True, "clip": 0.5},
    ]
    check(ranks, 2, cases, {})
    model = made({})
    load_parameters(folder, model)
    assert model[3].weight is model[0].weight
    torch.testing.assert_close(model[0].weight.detach(), alone(cases[0], 1)["0.weight"], rtol=1e-5, atol=2e-6)


def test_tied_weights_beside_other_axes(ranks: Ranks) -> None:
    """Two replicas, a stage in between that has no copy, parameters cut over two ranks, layers cut over two ranks."""
    two = {"pp_degree": 2}
    sharding = {"sharding": True, "sharding_configs": {"stage": 3}, "hybrid_configs": two}
    cases: list[dict[str, Any]] = [
        {"name": "replicas", "fields": {"hybrid_configs": two}},
        {"name": "four stages", "stages": ["1", "2", "3"]},
    ]
    both = {"tensor_parallel": True, "hybrid_configs": {**two, "mp_degree": 2}}
    for traced in (False, True):
        how = {"traced": traced}
        cases.append({"name": f"stage 3 {traced}", "fields": sharding, **how})
        cases.append({"name": f"parallel {traced}", "parallel": True, "clip": 0.5, "fields": both, **how})
    check(ranks, 4, cases, {"replicas": 2, "stage 3 False": 2, "stage 3 True": 2})
