"""Pipelines against the same model in one process: losses, parameters after steps, names; every way to say the stages.

Sums are made in another order than in one process: float32 results agree to 1e-6 of numbers of about 1. Models with
batch norms of few samples, which make small differences large, are compared in float64.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import each_of
from support.grids import first_of
from support.messages import naming
from support.ranks import Ranks, export_once
from torch import nn

import torchfleet as fleet
from torchfleet.base.device_guard import device_guard
from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.collective.pipeline import stages
from torchfleet.collective.pipeline.micro_batches import batch_size_of, cut_batch, num_micro_batches
from torchfleet.collective.pipeline.shapes import shape_of

pytestmark = pytest.mark.xdist_group("traced")
prepare_ranks = export_once

EXACT = {"rtol": 1e-6, "atol": 1e-6}
BATCH, DIM, WORDS = 8, 6, 11


class Chain(nn.Sequential):
    """Six layers in a row, in two Sequentials."""

    def __init__(self, norm: bool = False) -> None:
        body = [nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 9), nn.BatchNorm1d(9) if norm else nn.Tanh()]
        head = nn.Sequential(nn.Linear(9, DIM), nn.Linear(DIM, 3))
        super().__init__(OrderedDict(body=nn.Sequential(*body), head=head))


class Guarded(nn.Sequential):
    def __init__(self) -> None:
        with device_guard("gpu:0"):
            first = nn.Linear(DIM, 9)
        with device_guard("gpu:1"):
            second = nn.Linear(9, 3)
        super().__init__(first, nn.Tanh(), second)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.statistics = nn.BatchNorm1d(DIM)
        self.inside = nn.Linear(DIM, DIM)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        looked = self.inside(self.norm(rows)).tanh() * mask.unsqueeze(-1)
        return rows + looked + self.statistics(places.to(rows.dtype)).unsqueeze(1)


class Net(nn.Module):
    """No Sequential: an input and a table that later stages use too, integers and a skip connection that cross."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, DIM), persistent=False)
        self.words = nn.Embedding(WORDS, DIM)
        with device_guard("stage:0"):
            self.first = Block()
        with device_guard("stage:1"):
            self.second = Block()
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = ids[:, :DIM] * 2
        words = self.words(ids)
        rows = self.second(self.first(words, mask, places), mask, places)
        return self.head(rows.mean(1) + words.sum(1) * self.table), rows


def made(kind: str) -> nn.Module:
    torch.manual_seed(5)
    kinds = {"chain": Chain, "norms": lambda: Chain(True), "guarded": Guarded, "net": Net}
    return kinds[kind]().to(number_type(kind))  # type: ignore[operator,no-any-return]


def number_type(kind: str) -> torch.dtype:
    return torch.float64 if kind in ("norms", "net") else torch.float32


def batch(kind: str, index: int, size: int = BATCH) -> tuple[Any, torch.Tensor]:
    random = torch.Generator().manual_seed(index)
    target = torch.randn(size, 3, generator=random, dtype=number_type(kind))
    if kind != "net":
        return torch.randn(size, DIM, generator=random, dtype=number_type(kind)), target
    ids = torch.randint(0, WORDS, (size, 7), generator=random)
    return {"ids": ids, "mask": torch.rand(size, 7, generator=random) < 0.8}, target


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return ((output[0] if isinstance(output, tuple) else output) - target).square().mean()


def refuse_pickles(*_: Any, **__: Any) -> None:
    raise AssertionError("an object was pickled")


def train(kind: str, settings: dict[str, Any], steps: int = 3, offset: int = 0, size: int = BATCH) -> dict[str, Any]:
    """Some steps; then the names, the parameters and buffers that this rank has, and what it predicts."""
    dist.send_object_list = dist.recv_object_list = refuse_pickles
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, **settings))
    model = fleet.distributed_model(made(kind))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses: dict[str, float] = {}
    for step in range(steps):
        loss = model.train_batch(*batch(kind, step + offset * fleet.data_shard()[0], size), loss_of)
        if loss is not None:
            losses[f"loss.{step}"] = float(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    predicted = model.eval_batch(batch(kind, 100, 5)[0])
    state = {f"state.{name}": value for name, value in model.state_dict().items()}
    fleet.stop_worker()
    return {**losses, **state, **({} if predicted is None else {"predicted": flat(predicted)})}


def flat(outputs: Any) -> torch.Tensor:
    return torch.cat([output.flatten() for output in (outputs if isinstance(outputs, tuple) else [outputs])])


def alone(
    kind: str, steps: int = 3, num: int = 4, precision: str = "", replicas: int = 1, merged: int = 1
) -> dict[str, Any]:
    """The same in one process, micro-batch by micro-batch."""
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result: dict[str, Any] = {}

    def call(inputs: Any) -> Any:
        with torch.autocast("cpu", getattr(torch, precision or "bfloat16"), enabled=bool(precision)):
            outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        return outputs.float() if precision else outputs

    for step in range(steps):
        micro_batches = [
            micro_batch
            for replica in range(replicas)
            for micro_batch in cut_batch(batch(kind, step + 10 * replica), num)
        ]
        losses = [loss_of(call(inputs), target) for inputs, target in micro_batches]
        result[f"loss.{step}"] = float(torch.stack(losses[:num]).detach().mean())
        (torch.stack(losses).mean() / merged).backward()
        if (step + 1) % merged == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        result["predicted"] = flat(call(batch(kind, 100, 5)[0]))
    return {**result, **{f"state.{name}": value for name, value in model.state_dict().items()}}


def same(pipeline: list[dict[str, Any]], expected: dict[str, Any], **tolerance: float) -> None:
    """Every name is on one rank, and equal to the one-process result."""
    found = {name: value for result in pipeline for name, value in result.items()}
    assert sum(map(len, pipeline)) == len(found) == len(expected)
    for name, value in expected.items():
        where = {"msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(found[name], value, **where, **(tolerance or EXACT))


def pipeline(**configs: Any) -> dict[str, Any]:
    return {"pipeline_configs": {"accumulate_steps": 4, **configs}}


@pytest.mark.parametrize("mode", first_of(["1F1B", "F-then-B"]))
@pytest.mark.parametrize("kind", ["chain", "norms", "guarded"])
def test_pipeline_equals_sequential(ranks: Ranks, kind: str, mode: str) -> None:
    found = ranks.run(train, 2, kind=kind, settings=pipeline(schedule_mode=mode))
    same(found, alone(kind))
    assert "loss.0" not in found[0]
    assert "loss.0" in found[1]


def test_more_stages_than_micro_batches(ranks: Ranks) -> None:
    configs = {"micro_batch_size": 4, "stages": ["body.2", "body.3", "head.1"]}
    same(ranks.run(train, 4, kind="chain", settings={"pipeline_configs": configs}), alone("chain", num=2))


@pytest.mark.parametrize("kind", ["norms", "net"])  # the second is made for two stages
def test_one_rank_runs_the_whole_model(ranks: Ranks, kind: str) -> None:
    same(ranks.run(train, 1, kind=kind, settings=pipeline()), alone(kind))


def test_a_model_that_is_no_sequential_is_traced(ranks: Ranks) -> None:
    found = ranks.run(train, 2, kind="net", settings=pipeline())
    same(found, alone("net"))
    others = {name for name in found[1] if "state" in name and "second" not in name}
    assert others == {"state.head.weight", "state.head.bias"}


@pytest.mark.parametrize("kind", ["chain", "net"])
def test_recompute_inside_stages_changes_nothing(ranks: Ranks, kind: str) -> None:
    checkpoints = ["body.*", "head"] if kind == "chain" else ["first", "second"]
    settings = pipeline(stages=["body.2"] if kind == "chain" else [])
    settings |= {"recompute": True, "recompute_configs": {"checkpoints": checkpoints}}
    same(ranks.run(train, 2, kind=kind, settings=settings), alone(kind))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 4e-3), ("float16", 1e-3)])
def test_amp_equals_autocast(ranks: Ranks, dtype: str, tolerance: float) -> None:
    """Activations cross in half precision as they are. In float16 gradients are scaled, which rounds them elsewhere:
    tolerances are half a unit in the last place of numbers of about 1 (2^-8 and 2^-11), times a few steps."""
    settings = pipeline(stages=["body.2"]) | {"amp": True, "amp_configs": {"dtype": dtype}}
    settings |= {"recompute": True, "recompute_configs": {"checkpoints": ["body.*"]}}
    found = ranks.run(train, 2, kind="chain", settings=settings)
    same(found, alone("chain", precision=dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("extra", first_of(["sharded", "data", "merged"]))
def test_pipelines_side_by_side(ranks: Ranks, extra: str) -> None:
    """2 × 2: two pipelines of two stages, on different batches; gathered over two batches; optimizer's state cut."""
    settings = pipeline() | {"hybrid_configs": {"pp_degree": 2}}
    if extra == "merged":
        settings |= {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    if extra == "sharded":
        settings |= {"sharding": True, "sharding_configs": {"stage": 1}}
    found = ranks.run(train, 4, kind="chain", settings=settings, steps=4, offset=10)
    expected = alone("chain", 4, replicas=2, merged=2 if extra == "merged" else 1)
    pipelines = [(0, 2), (1, 3)] if extra == "sharded" else [(0, 1), (2, 3)]  # the ranks that share out are neighbours
    for place, (first, second) in enumerate(pipelines):
        if place:  # its batches are others
            found[second].update({name: expected[name] for name in expected if "loss" in name})
        same([found[first], found[second]], expected)


def frozen_first_stage() -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, **pipeline()))
    whole = made("chain")
    whole.body.requires_grad_(False)
    model = fleet.distributed_model(whole)
    parameters = list(model.parameters())
    for size in (8, 16, 8):  # another size of batch, and the first again
        model.train_batch(*batch("chain", size, size), loss_of)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    fleet.stop_worker()
    return {"num": len(gradients), "gradient": flat(tuple(gradients)) if gradients else torch.zeros(0)}


def test_a_frozen_stage_and_batches_of_other_sizes(ranks: Ranks) -> None:
    first, second = ranks.run(frozen_first_stage, 2)
    model = made("chain")
    for size in (8, 16, 8):
        inputs, target = batch("chain", size, size)
        loss_of(model(inputs), target).backward()
    assert first["num"] == 0
    expected = flat(tuple(parameter.grad for parameter in model.head.parameters()))
    torch.testing.assert_close(second["gradient"], expected, **EXACT)


# Where the stages begin


def test_a_sequential_is_cut_evenly() -> None:
    sizes = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8), nn.Linear(8, 1))
    assert stages.starts(sizes, [], 2) == ["4"]  # 24 + 18 and 24 + 9: the ReLU stays with what it follows
    assert stages.starts(sizes, [], 3) == ["2", "4"]
    assert stages.starts(Chain(), [], 2) == ["head.0"]  # 42 + 63 and 60 + 21
    assert stages.starts(Chain(), ["body.2"], 2) == ["body.2"]
    assert stages.starts(Chain(), [], 1) == []


def test_guards_nest_and_the_inner_one_counts() -> None:
    with device_guard("cpu"):
        first = nn.Linear(1, 1)
        with device_guard("stage:1"):
            second = nn.Linear(1, 1)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
    assert stages.starts(model, [], 2) == ["2"]
    assert stages.stage_of_modules(model, ["2"]) == {"": 0, "0": 0, "1": 0, "2": 1, "3": 1}
    assert "_fleet_stage" not in vars(nn.Linear(1, 1))  # the guard is over


def backwards() -> nn.Module:
    with device_guard("gpu:1"):
        first = nn.Linear(1, 1)
    with device_guard("gpu:0"):
        second = nn.Linear(1, 1)
    return nn.Sequential(first, second)


@each_of(
    ("model", "said", "text"),
    [
        (Net, ["second"], "pipeline_configs['stages'] device_guard"),
        (Chain, ["tail"], "'tail' 'head'"),
        (Chain, ["head", "body.1"], "head body.1"),
        (Chain, ["body.1", "head"], "3 body.1 head 2"),
        (Block, [], "Block torch.nn.Sequential"),
        (lambda: nn.Sequential(nn.Linear(1, 1)), [], "1 2"),
        (backwards, [], "device_guard '1' 0 1"),
    ],
)
def test_stages_that_cannot_be_are_named(model: Any, said: list[str], text: str) -> None:
    with pytest.raises((StrategyError, ModelError), match=naming(*text.split())):
        stages.starts(model(), said, 2)


def test_an_unknown_device_is_named() -> None:
    with (
        pytest.raises(StrategyError, match=naming("device_guard('tpu:1')", "'gpu:<stage>'")),
        device_guard("tpu:1"),
    ):
        pass


# Batches


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((10, 4, 0), "accumulate_steps']=4 10"),
        ((10, 1, 4), "micro_batch_size']=4 10"),
        ((8, 4, 4), "micro_batch_size=4 accumulate_steps=4 8"),
    ],
)
def test_batches_that_cannot_be_cut_are_named(arguments: tuple[int, int, int], text: str) -> None:
    with pytest.raises(StrategyError, match=naming(*text.split())):
        num_micro_batches(*arguments)


def test_batches_are_cut_in_any_structure() -> None:
    assert [num_micro_batches(8, 4, 0), num_micro_batches(8, 1, 2), num_micro_batches(8, 4, 2)] == [4, 4, 4]
    tree = {"a": torch.arange(4), "b": [torch.zeros(4, 2), None, 3.0]}
    first, second = cut_batch(tree, 2)
    assert first["a"].tolist() == [0, 1]
    assert second["b"][0].shape == (2, 2)
    assert second["b"][1:] == [None, 3.0]
    with pytest.raises(ModelError, match=naming("(4,)", "(3, 2)")):
        batch_size_of({"a": torch.zeros(4)}, torch.zeros(3, 2))


def test_what_is_no_tensor_cannot_cross() -> None:
    assert shape_of(torch.zeros(2, 3)) == ((2, 3), torch.float32)
    for wrong in ({}, torch.zeros(1, dtype=torch.complex64)):
        with pytest.raises(ModelError, match=r"dict|torch\.complex64"):
            shape_of(wrong)


# Mistakes that ranks find


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows) if rows.sum().item() > 0 else rows)  # type: ignore[no-any-return]


class Late(Branching):
    """What forward calls last was assigned first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.first
        self.first = nn.Linear(DIM, DIM)
        del self.last
        self.third = nn.Linear(DIM, DIM)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.third(rows)))  # type: ignore[no-any-return]


def mistaken(kind: str) -> dict[str, Any]:
    models = {"branching": Branching, "late": Late, "called": Chain}
    settings = pipeline(stages=[] if kind == "called" else ["second"])
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, **settings))
    try:
        model = fleet.distributed_model(models[kind]())
        if kind == "called":
            model(torch.zeros(8, DIM))
        model.train_batch(*batch("chain", 0), loss_of)
    except (ModelError, StrategyError, RuntimeError) as error:
        return {"text": str(error)}
    finally:
        dist.barrier()  # a rank that left early would take the other's connections with it
    return {"text": "nothing"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("branching", "torch.export cannot trace this Branching"),
        ("late", "stage 0 uses 'third.weight', which belongs to another stage"),
        ("called", "use model.train_batch(inputs, target, loss_fn)"),
    ],
)
def test_mistakes_are_named(ranks: Ranks, kind: str, text: str) -> None:
    assert text in ranks.run(mistaken, 2, kind=kind)[0]["text"]
