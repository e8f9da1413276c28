"""`fleet plan --model` beside what ranks really hold, and beside counts by hand."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support import pages
from support.paths import ROOT
from support.ranks import Ranks
from torch import nn

import torchfleet as fleet
from torchfleet.base.errors import ModelError
from torchfleet.collective.tensors.local_tensors import local
from torchfleet.observe.commands.command import main
from torchfleet.observe.plan.model_plan import ModelSize, plans, size_of

STAGES = ["data parallelism", "sharding, stage 1", "sharding, stage 2", "sharding, stage 3"]


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.zeros(4, 8),)


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("planned_makers")
    vars(module).update(network=network, small=small, number=lambda: 3)
    monkeypatch.setitem(sys.modules, "planned_makers", module)
    return "planned_makers"


def held() -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state that a rank has after a step, by stage."""
    found: dict[str, Any] = {}
    for stage, name in enumerate(STAGES):
        strategy = fleet.DistributedStrategy()
        if stage:
            strategy = fleet.DistributedStrategy(sharding=True, sharding_configs={"stage": stage})
        fleet.init(is_collective=True, strategy=strategy)
        model: Any = fleet.distributed_model(network())
        optimizer: Any = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        own = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
        state = [v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v) and v.dim()]
        found[name] = sum(local(tensor).nbytes for tensor in [*own, *state])
        fleet.stop_worker()
    return found


@pytest.mark.slow
def test_ranks_hold_what_was_planned(ranks: Ranks, makers: str) -> None:
    planned = {one.strategy: one.state_bytes for one in plans(size_of(f"{makers}:network"), 2, "adam")}
    for found in ranks.run(held, 2):
        for name, number in found.items():
            assert number == pytest.approx(planned[name], rel=0.02), name


def test_activations_and_operations_are_those_counted_by_hand(makers: str) -> None:
    size = size_of(f"{makers}:small")
    assert size.parameters == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert size.largest == 4 * (8 * 16 + 16)
    assert size.activations == 4 * (4 * 8 + 4 * 16)  # the input, and what ReLU returns
    assert size.flops == 3 * 2 * (4 * 8 * 16 + 4 * 16 * 4)


def test_one_rank_exchanges_and_gathers_nothing() -> None:
    for one in plans(ModelSize(100, 7, 40, 1000, 1.0), 1, "momentum"):
        assert (one.state_bytes, one.gathered_bytes, one.exchanged_bytes) == (307, 0, 0)


def test_the_command_prints_every_strategy(makers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", f"{makers}:small", "--ranks", "4", "--tflops", "100"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in STAGES if name not in printed] == []
    assert main(["plan", "--model", f"{makers}:small", "--ranks", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]["sharding, stage 1"]["state_bytes"] == 848 * 2 + 848 * 2 / 4


def test_the_module_is_looked_for_in_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_here.py").write_text("import torch\ndef make(): return torch.nn.Linear(3, 5)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    assert size_of("planned_here:make").parameters == 4 * (3 * 5 + 5)


@pytest.mark.slow
def test_the_page_runs_as_written(tmp_path: Path) -> None:
    pages.follow(ROOT / "docs" / "collective" / "which_strategy.md", tmp_path)


@pytest.mark.parametrize("path", ["planned_makers:number", "planned_makers:nothing", "no_such_module:f", "x"])
def test_what_makes_no_model_is_refused(makers: str, path: str) -> None:
    with pytest.raises(ModelError):
        size_of(path)
