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
from benchmarks.host_tensors import HostTensors
from torchfleet.base.errors import ModelError
from torchfleet.collective.tensors.local_tensors import local
from torchfleet.observe.commands.command import main
from torchfleet.observe.plan.model_plan import ModelSize, plans, size_of

STAGES = ["data parallelism", "sharding, stage 1", "sharding, stage 2", "sharding, stage 3"]


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def layers() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Six layers with attention; activations are more than parameters."""
    made = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(6)]
    return nn.Sequential(*made), (torch.zeros(4, 64, 64),)


class Language(nn.Module):
    """A third of its parameters are outside of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(800, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4))
        self.scores = nn.Linear(64, 800)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.scores(hidden)


def language() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Language(), (torch.zeros(2, 64, dtype=torch.int64),)


MODELS = {"layers": layers, "language": language}


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.zeros(4, 8),)


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("planned_makers")
    vars(module).update(network=network, small=small, number=lambda: 3, **MODELS)
    monkeypatch.setitem(sys.modules, "planned_makers", module)
    return "planned_makers"


def trained(stage: int, whole: nn.Module, batch: torch.Tensor) -> tuple[Any, Any]:
    """A model and its optimizer after a step."""
    strategy = fleet.DistributedStrategy()
    if stage:
        strategy = fleet.DistributedStrategy(sharding=True, sharding_configs={"stage": stage})
    fleet.init(is_collective=True, strategy=strategy)
    model: Any = fleet.distributed_model(whole)
    optimizer: Any = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
    model(batch).square().mean().backward()
    optimizer.step()
    return model, optimizer


def held() -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state that a rank has after a step, by stage."""
    found: dict[str, Any] = {}
    for stage, name in enumerate(STAGES):
        model, optimizer = trained(stage, network(), torch.ones(2, 32))
        own = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
        state = [v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v) and v.dim()]
        found[name] = sum(local(tensor).nbytes for tensor in [*own, *state])
        fleet.stop_worker()
    return found


def most_held() -> dict[str, Any]:
    """By model and stage: the most bytes that a rank has in forward and backward, beside what it has at rest.

    The least of four passes: in the first, torch makes the buckets of data parallelism anew; and threads of gloo let go
    of what they have sent at any time after it.
    """
    found: dict[str, Any] = {}
    for kind, make in MODELS.items():
        for stage, name in enumerate(STAGES):
            whole, (batch,) = make()
            model, _ = trained(stage, whole, batch)
            peaks = []
            for _ in range(4):
                with HostTensors() as host:
                    model(batch).square().mean().backward()
                peaks.append(host.peak + batch.nbytes)
            found[f"{kind}: {name}"] = min(peaks)
            fleet.stop_worker()
    return found


@pytest.mark.slow
def test_ranks_take_in_a_step_what_was_planned(ranks: Ranks, makers: str) -> None:
    planned = {
        f"{kind}: {one.strategy}": one
        for kind in MODELS
        for one in plans(size_of(f"{makers}:{kind}"), 2, "adam")
        if one.strategy in STAGES
    }
    for found in ranks.run(most_held, 2):
        assert set(found) == set(planned)
        for name, number in found.items():
            one = planned[name]
            is_whole = not one.gathered_bytes  # every tensor is known; else some are in the exchange's hands
            assert one.state_bytes + number == pytest.approx(one.bytes, rel=0.001 if is_whole else 0.1), name


@pytest.mark.slow
def test_ranks_hold_what_was_planned(ranks: Ranks, makers: str) -> None:
    planned = {one.strategy: one.state_bytes for one in plans(size_of(f"{makers}:network"), 2, "adam")}
    for found in ranks.run(held, 2):
        for name, number in found.items():
            assert number == pytest.approx(planned[name], rel=0.02), name


def test_operations_and_units_are_those_counted_by_hand(makers: str) -> None:
    size = size_of(f"{makers}:small")
    assert size.parameters == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert size.flops == 3 * 2 * (4 * 8 * 16 + 4 * 16 * 4)
    blocks = size_of(f"{makers}:language")
    block = 4 * (64 * 192 + 192 + 64 * 64 + 64 + 2 * 64 * 256 + 256 + 64 + 4 * 64)
    assert blocks.largest == block
    assert blocks.outside == 4 * (800 * 64 + 64 * 800 + 800)
    words, heads = 2 * 64, 2 * 4
    products = words * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 2 * heads * 64 * 64 * 16  # of a block, with attention
    assert blocks.flops == 3 * 2 * (4 * products + words * 64 * 800)


@pytest.mark.parametrize("kind", MODELS)
def test_activations_are_those_of_a_step_on_the_host(makers: str, kind: str) -> None:
    model, (batch,) = MODELS[kind]()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with HostTensors() as host:
        model(batch).square().mean().backward()
    assert size_of(f"{makers}:{kind}").activations == host.peak + batch.nbytes


def test_one_rank_exchanges_and_gathers_nothing() -> None:
    for one in plans(ModelSize(100, 7, 40, 20, 1000, 1.0), 1, "momentum"):
        assert (one.state_bytes, one.gathered_bytes, one.exchanged_bytes) == (307, 0, 0)


def test_gradients_count_where_activations_are_fewer() -> None:
    sizes = [ModelSize(100, 0, 40, 20, activations, 1.0) for activations in (100, 25)]
    many, few = ({one.strategy: one for one in plans(size, 2, "sgd")} for size in sizes)
    assert [many[name].gathered_bytes for name in STAGES] == [0, 0, 100 + 40, 3 * 40 + 20]
    assert [few[name].gathered_bytes for name in STAGES] == [0, 0, 100 + 1.75 * 40, 3.75 * 40 + 1.75 * 20]
    assert many["stage 3, context_parallel"].gathered_bytes == 3.5 * 40 + 1.5 * 20


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
