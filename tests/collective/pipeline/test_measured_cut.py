"""Stages that a dry step finds: where they begin, that all ranks agree, and that training equals one process."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import naming
from support.ranks import Ranks, export_once
from torch import nn
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.pipeline import orders, stages
from torchfleet.collective.pipeline.measured_cut import MeasuredCut, agreed
from torchfleet.collective.pipeline.micro_batches import cut_batch
from torchfleet.collective.pipeline.stage_cuts import Unit

pytestmark = pytest.mark.xdist_group("traced")
prepare_ranks = export_once

WORDS, DIM, BATCH, NUM = 12, 6, 8, 4
SECONDS = 0.1  # that the dear block sleeps; all others together take a few milliseconds


class Block(nn.Module):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.inside, self._seconds = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return x + self.inside(x).tanh()  # type: ignore[no-any-return]


class Heavy(nn.Module):
    """A product that takes a hundred times as many operations as all other blocks together."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.full((700, 700), 1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.table
        for _ in range(4):
            shift = shift @ self.table
        return x + self.inside(x).tanh() + shift.mean()  # type: ignore[no-any-return]


class Traced(nn.Module):
    """Blocks in a list, a module that is called between all of them, and an embedding that is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, DIM), nn.Dropout(0.0)
        self.blocks = nn.ModuleList([Block(), Block(), Heavy(), Block()])
        self.head = nn.Linear(DIM, WORDS)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = self.drop(block(x))
        return loss_of(self.head(x), target)


def loss_of(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def made(is_traced: bool) -> Any:
    torch.manual_seed(3)
    if is_traced:
        return Traced()
    blocks = [Block(), Block(SECONDS), Block(), Block()]
    return nn.Sequential(nn.Embedding(WORDS, DIM), *blocks, nn.Linear(DIM, WORDS))


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(index)
    return torch.randint(WORDS, (BATCH, 5), generator=random), torch.randint(WORDS, (BATCH, 5), generator=random)


def train(is_traced: bool, configs: dict[str, Any]) -> dict[str, Any]:
    given = {"accumulate_steps": NUM, "cut": "measured", **configs}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, pipeline_configs=given))
    inputs = batch(0) if is_traced else batch(0)[0]
    model: Any = fleet.distributed_model(made(is_traced), dry_batch=inputs)
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    for step in range(2):
        if is_traced:
            model(*batch(step)).backward()
        else:
            model.train_batch(*batch(step), loss_of)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    fleet.stop_worker()
    return found


def alone(is_traced: bool) -> dict[str, Any]:
    model = made(is_traced)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(2):
        parts = cut_batch(batch(step), NUM)
        losses = [model(x, y) if is_traced else loss_of(model(x), y) for x, y in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("configs", "num_ranks"), [({}, 3), ({"schedule_mode": "Interleaved1F1B", "vpp_degree": 2, "memory_MB": 4}, 2)]
)
def test_a_dear_module_gets_a_stage_of_its_own(ranks: Ranks, configs: dict[str, Any], num_ranks: int) -> None:
    """And training equals one process. Neighbouring stages are on different ranks."""
    found = ranks.run(train, num_ranks, is_traced=False, configs=configs)
    every = {name: value for result in found for name, value in result.items()}
    torch.testing.assert_close(every, alone(False), rtol=1e-5, atol=1e-6)
    assert sum(map(len, found)) == len(every)
    modules = [{name.split(".")[0] for name in result} for result in found]
    (beside,) = [own for own in modules if "2" in own]
    assert not beside & {"1", "3"}


@pytest.mark.slow
def test_a_model_that_returns_its_loss_is_cut_between_its_blocks(ranks: Ranks) -> None:
    found = ranks.run(train, 3, is_traced=True, configs={})
    every = {name: value for result in found for name, value in result.items()}
    torch.testing.assert_close(every, alone(True), rtol=1e-5, atol=1e-6)
    assert {name for name in found[1] if "table" not in name} == {"blocks.2.inside.weight", "blocks.2.inside.bias"}


class Late(nn.Module):
    """What is used last was assigned first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def refused(case: str) -> dict[str, Any]:
    """What distributed_model says."""
    configs: dict[str, Any] = {"accumulate_steps": NUM, "cut": "measured"}
    if case == "memory":
        configs["memory_MB"] = 0.001
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, pipeline_configs=configs))
    wrong = torch.ones(BATCH, 5) if case == "rank" and fleet.worker_index() == 1 else batch(0)[0]
    model = Late() if case == "late" else made(False)
    if case == "guard":
        with fleet.device_guard("gpu:1"):
            model.append(nn.Linear(WORDS, WORDS))
    try:
        fleet.distributed_model(model, dry_batch=None if case == "none" else wrong)
    except (ModelError, StrategyError) as error:
        return {"text": str(error)}
    finally:
        fleet.barrier_worker()  # a rank that left early would take the other's connections with it
    return {"text": ""}


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("memory", "'0' 0.001 pipeline_configs['memory_MB']"),
        ("rank", "'0' dry_batch"),
        ("guard", "pipeline_configs['cut'] device_guard '6'"),
        ("none", "pipeline=True dry_batch"),
        ("late", "2 stages no module order forward"),
    ],
)
def test_all_ranks_refuse(ranks: Ranks, case: str, text: str) -> None:
    for found in ranks.run(refused, 2, case=case):
        assert all(part in found["text"] for part in text.split()), found["text"]


# What ranks tell each other


class Told:
    """Stands for a world: the other ranks have told it something already."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self._others = others

    def gather(self, data: bytes) -> list[bytes]:
        return [data, *(json.dumps(other).encode() for other in self._others)]


def told(*seconds: float, bound: float = 100.0, inside: float = 1.0) -> dict[str, Any]:
    return {"units": [vars(unit) for unit in row(*seconds, inside=inside)], "bound": bound}


def row(*seconds: float, inside: float = 1.0) -> list[Unit]:
    return [Unit(str(place), number, 1.0, inside, 2.0, 0.0, 0.0) for place, number in enumerate(seconds)]


def test_the_median_of_times_and_the_most_bytes_count() -> None:
    world: Any = Told(told(2.0, 9.0, inside=7.0), told(30.0, 4.0, bound=50.0))
    units, bound = agreed(world, lambda: row(1.0, 5.0), 80.0)
    assert [unit.seconds for unit in units] == [2.0, 5.0]
    assert [unit.inside for unit in units] == [7.0, 7.0]
    assert bound == 50.0


def fail() -> list[Unit]:
    raise ModelError("no memory")


def test_a_failure_is_told_to_all_ranks() -> None:
    with pytest.raises(ModelError, match=naming("rank 1", "lost")):
        agreed(Told({"error": "lost"}), lambda: row(1.0), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no memory"):
        agreed(Told(told(1.0)), fail, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="different modules"):
        agreed(Told(told(1.0, 2.0)), lambda: row(1.0), 1.0)  # type: ignore[arg-type]


# Modules, orders and settings


def test_no_stage_begins_between_the_owner_and_the_user_of_a_parameter() -> None:
    class Shifted(Traced):
        def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](self.words(ids)))
            shift = self.blocks[0].inside[1].bias.sin()  # type: ignore[union-attr,operator,index]
            return loss_of(self.head(self.blocks[3](self.blocks[2](x) + shift)), target)

    world: Any = SimpleNamespace(degrees={"sharding": 1}, device=torch.device("cpu"))
    cut = MeasuredCut(DistributedStrategy(pipeline=True), world, [0, 1])
    found = {unit.name: unit.is_start for unit in cut._measure(Shifted(), (batch(0), {}), [])}
    # The shift is computed where the second block has run, and the blocks after that need only its value.
    assert found == {
        "words": True,
        "blocks.0": True,
        "blocks.1": False,
        **dict.fromkeys(("blocks.2", "blocks.3", "head"), True),
    }


def test_stages_begin_with_modules_that_are_called_once_and_in_order() -> None:
    names = stages.blocks(Traced())
    assert names == ["words", "drop", *(f"blocks.{place}" for place in range(4)), "head"]
    known = ["", "words", "drop", "blocks", "blocks.0", "blocks.1", "head"]
    called = ["", "words", "drop", "blocks.1", "blocks.0", "drop", "head"]
    assert stages.in_call_order(names, called, known) == ["words", "blocks.1", "head"]


@pytest.mark.parametrize("num", [1, 3, 8])
def test_micro_batches_under_way_are_those_of_the_schedule(num: int) -> None:
    size = 4
    assert orders.num_kept(orders.orders("1F1B", size, 1, num), size) == [min(num, size - rank) for rank in range(size)]
    assert orders.num_kept(orders.orders("F-then-B", size, 1, num), size) == [num] * size


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, 16 * 16 + 16),  # of each trained number: itself, its gradient, two of Adam; of a frozen one: itself
        (1, 16 * 12 + 16),
        (2, 16 * 12 + 16 * 1.5),  # half of everything, and the whole parameters while they are gathered
    ],
)
def test_state_is_counted_by_the_strategy(stage: int, expected: float) -> None:
    fields = {"sharding": True, "sharding_configs": {"stage": stage}} if stage else {}
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    assert state_of(layer, fields, 2 if stage else 1) == expected


def test_a_parameter_in_half_precision_has_a_copy_in_float32() -> None:
    assert state_of(nn.Linear(4, 4, bias=False).half(), {}, 1) == 16 * (2 + 2 + 3 * 4)


def state_of(module: nn.Module, fields: dict[str, Any], degree: int) -> float:
    world: Any = SimpleNamespace(degrees={"sharding": degree})
    return MeasuredCut(DistributedStrategy(pipeline=True, **fields), world, [0, 1])._state(module)


@pytest.mark.parametrize(
    ("configs", "text"),
    [
        ({"cut": "measured", "stages": ["1"]}, "cut='measured' stages"),
        ({"memory_MB": 100.0}, "memory_MB=100 cut='measured'"),
        ({"cut": "by hand"}, "even measured"),
    ],
)
def test_settings_that_contradict_each_other_are_named(configs: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=naming(*text.split())):
        DistributedStrategy(pipeline=True, pipeline_configs=configs)


def test_a_batch_that_nothing_measures_is_refused() -> None:
    fleet.init(is_collective=True)
    try:
        with pytest.raises(ModelError, match=naming("dry_batch", "pipeline_configs")):
            fleet.distributed_model(nn.Linear(1, 1), dry_batch=torch.zeros(1, 1))
    finally:
        fleet.stop_worker()
