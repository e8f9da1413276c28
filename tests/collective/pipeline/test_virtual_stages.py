"""Several stages on a rank, and backward passes in two parts, against the same model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.messages import naming
from support.ranks import Ranks, export_once
from torch import nn
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import StrategyError
from torchfleet.collective.pipeline.micro_batches import cut_batch
from torchfleet.collective.pipeline.split_backward import SplitBackward

pytestmark = pytest.mark.xdist_group("traced")
prepare_ranks = export_once

WORDS, DIM, BATCH, NUM = 12, 6, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(self.inside(self.norm(x)).tanh())  # type: ignore[no-any-return]  # used twice


class Chain(nn.Sequential):
    """An embedding that is the head's weight too, and blocks, the first ones in a Sequential of their own."""

    def __init__(self, num_blocks: int) -> None:
        words, head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS)
        head.weight = words.weight
        blocks = [Block() for _ in range(num_blocks)]
        super().__init__(words, nn.Sequential(*blocks[:2]), *blocks[2:], head)


class Traced(nn.Module):
    """A loss in forward; values of earlier stages that the last one needs, one of them from weights alone; a view."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.chain = Chain(num_blocks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.chain[0](ids)
        x = self.chain[1](words)
        shift = self.chain[1][0].inside.bias.sin()
        for block in list(self.chain)[2:-1]:
            x = block(x.transpose(1, 2).transpose(1, 2))
        return loss_of(self.chain[-1](x + words + shift), ids)


def loss_of(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), ids.roll(1, 1).flatten())


def made(is_traced: bool, num_blocks: int) -> Any:
    torch.manual_seed(3)
    return Traced(num_blocks) if is_traced else Chain(num_blocks)


def batch(index: int) -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, 5), generator=torch.Generator().manual_seed(index))


def starts(num_stages: int, is_traced: bool) -> list[str]:
    """A stage for the words, one for the first Sequential, and one for each other block; the head is in the last."""
    return [f"{'chain.' * is_traced}{place}" for place in range(1, num_stages)]


def train(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {case["name"]: train_one(case) for case in cases}


def train_one(case: dict[str, Any]) -> dict[str, Any]:
    is_traced, num_stages = case.get("traced", False), case["stages"]
    configs = {"accumulate_steps": NUM, "stages": starts(num_stages, is_traced), **case["configs"]}
    strategy = fleet.DistributedStrategy(pipeline=True, pipeline_configs=configs, **case.get("fields", {}))
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(made(is_traced, num_stages - 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    found: dict[str, Any] = {}
    for step in range(2):
        ids = batch(step + 10 * fleet.data_shard()[0])
        if is_traced:
            loss = model(ids)
            loss.backward()
        else:
            loss = model.train_batch(ids, ids, loss_of)
        if loss is not None:
            found[f"loss.{step}"] = float(loss.detach())
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    if not is_traced and (predicted := model.eval_batch(batch(99)[:3])) is not None:
        found["predicted"] = predicted
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    fleet.stop_worker()
    return found


def alone(is_traced: bool, num_stages: int, replicas: int = 1) -> dict[str, Any]:
    model = made(is_traced, num_stages - 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found: dict[str, Any] = {}
    for step in range(2):
        parts = [ids for replica in range(replicas) for ids in cut_batch(batch(step + 10 * replica), NUM)]
        losses = torch.stack([model(ids) if is_traced else loss_of(model(ids), ids) for ids in parts])
        found[f"loss.{step}"] = float(losses[:NUM].detach().mean())
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    if not is_traced:
        with torch.no_grad():
            found["predicted"] = model(batch(99)[:3])
    return {**found, **model.state_dict()}


def same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert {name for result in results for name in result} == {*expected}
    for result in results:
        for name, value in result.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def configs(mode: str, vpp_degree: int = 2) -> dict[str, Any]:
    return {"schedule_mode": mode, "vpp_degree": vpp_degree}


MODES = [("Interleaved1F1B", 2), ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)]


@pytest.mark.parametrize(
    ("mode", "vpp_degree"), [MODES[0], MODES[3], *(pytest.param(*mode, marks=pytest.mark.long) for mode in MODES[1:3])]
)
def test_stages_of_a_rank_equal_one_process(ranks: Ranks, mode: str, vpp_degree: int) -> None:
    """The last stage of the V is on the first rank, and there words and head are one parameter."""
    num = 2 * vpp_degree
    again = {"recompute": True, "recompute_configs": {"checkpoints": ["1.*", "2"]}}
    cases = [
        {"name": "chain", "stages": num, "configs": configs(mode, vpp_degree)},
        {"name": "traced", "traced": True, "stages": num, "configs": configs(mode, vpp_degree)},
    ]
    if mode == "Interleaved1F1B":
        cases.append({"name": "again", "stages": num, "configs": configs(mode, vpp_degree), "fields": again})
    found = ranks.run(train, 2, cases=cases)
    for case in cases:
        results = [result[case["name"]] for result in found]
        same(results, alone(case.get("traced", False), num))
        if not case.get("traced"):
            assert ["loss.0" in result for result in results] == [mode == "ZBVZeroBubble", mode != "ZBVZeroBubble"]


@pytest.mark.parametrize("mode", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_pipelines_with_virtual_stages_side_by_side(ranks: Ranks, mode: str) -> None:
    cases = [{"name": "x", "stages": 4, "configs": configs(mode), "fields": {"hybrid_configs": {"pp_degree": 2}}}]
    found = [result["x"] for result in ranks.run(train, 4, cases=cases)]
    expected = alone(False, 4, replicas=2)
    for result in found[2:]:
        result.update({name: expected[name] for name in result if "loss" in name})  # of other batches
    same(found[:2], expected)
    same(found[2:], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_split_backward_passes_with_amp(ranks: Ranks, dtype: str) -> None:
    """The same stages and the same sums as in 1F1B; in float16 the gradients of both parts are scaled."""
    amp = {"amp": True, "amp_configs": {"dtype": dtype}}
    modes = ("1F1B", "InterleavedZeroBubble")
    cases = [{"name": mode, "stages": 2, "configs": configs(mode, 1), "fields": amp} for mode in modes]
    for result in ranks.run(train, 2, cases=cases):
        same([result[modes[1]]], result[modes[0]])


@pytest.mark.long
@pytest.mark.parametrize(("mode", "vpp_degree"), [("1F1B", 1), *MODES])
def test_eight_ranks(ranks: Ranks, mode: str, vpp_degree: int) -> None:
    cases = [{"name": "x", "stages": 8 * vpp_degree, "configs": configs(mode, vpp_degree)}]
    same([result["x"] for result in ranks.run(train, 8, cases=cases)], alone(False, 8 * vpp_degree))


def test_a_split_backward_pass_has_the_gradients_of_a_whole_one() -> None:
    """A weight that is used twice, outputs that do not depend on the inputs, inputs without gradients."""
    torch.manual_seed(0)
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)

    def outputs(x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        y = layer(layer(x).tanh())
        weights_alone = (other.weight @ layer.weight).sum(0)
        return {"twice": [y.tanh(), other(y)], "weights": [y + other.bias, weights_alone], "loss": [other(y).sum()]}

    parameters = [*layer.parameters(), *other.parameters()]
    for name in ("twice", "weights", "loss"):
        for is_input in (True, False):
            found = []
            for is_split in (False, True):
                for parameter in parameters:
                    parameter.grad = None
                x = torch.linspace(-1, 1, 6).view(2, 3).clone().requires_grad_(is_input)
                results = outputs(x)[name]
                given = [None if name == "loss" else torch.full_like(result, 0.5) for result in results]
                if is_split:
                    split = SplitBackward(results, given, [x], parameters)
                    gradients = [split.input_gradients[0]]
                    split.finish()
                else:
                    torch.autograd.backward(results, given)
                    gradients = [x.grad]
                found.append([*gradients, *(parameter.grad for parameter in parameters)])
            for whole, parts in zip(*found, strict=True):
                assert (whole is None) == (parts is None), (name, is_input)
                if whole is not None:
                    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "vpp_degree"), [("1F1B", 2), ("F-then-B", 2), ("Interleaved1F1B", 1), ("ZBVZeroBubble", 1)]
)
def test_modes_and_numbers_of_stages_that_contradict_each_other(mode: str, vpp_degree: int) -> None:
    with pytest.raises(StrategyError, match=naming(mode, f"vpp_degree={vpp_degree}")):
        fleet.DistributedStrategy(pipeline=True, pipeline_configs=configs(mode, vpp_degree))


def refused(fields: dict[str, Any]) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, **fields))
    try:
        fleet.distributed_model(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    except StrategyError as error:
        return {"text": str(error)}
    return {"text": ""}


@pytest.mark.parametrize(
    ("mode", "fields", "named"),
    [
        ("Interleaved1F1B", {"sharding": True, "sharding_configs": {"stage": 2}}, "sharding (stage 2)"),
        ("ZBVZeroBubble", {"sharding": True, "sharding_configs": {"stage": 3}}, "sharding (stage 3)"),
        ("InterleavedZeroBubble", {"tensor_parallel": True}, "tensor_parallel"),
        ("ZBVZeroBubble", {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}}, "recompute"),
    ],
)
def test_strategies_that_cannot_be_combined(ranks: Ranks, mode: str, fields: dict[str, Any], named: str) -> None:
    text = ranks.run(refused, 1, fields={"pipeline_configs": configs(mode), **fields})[0]["text"]
    assert named in text
    assert mode in text
