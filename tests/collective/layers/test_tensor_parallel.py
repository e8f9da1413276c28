"""Tensor-parallel layers against dense ones, and training with them against one process.

Sums are made in another order: float32 results agree to 1e-6 of numbers of about 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.grids import first_of
from support.ranks import Ranks
from torch import nn

import torchfleet as fleet
from torchfleet.base.errors import ModelError
from torchfleet.collective.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

EXACT = {"rtol": 1e-6, "atol": 1e-6}
WORDS, DIM = 11, 6


class Net(nn.Module):
    """Every kind of layer; `inner` is what the middle ones are cut over."""

    def __init__(self, inner: int = 8, parallel: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        if parallel:
            self.words: nn.Module = VocabParallelEmbedding(WORDS, DIM, padding_idx=7)
            self.up: nn.Module = ColumnParallelLinear(DIM, inner, gather_output=False)
            self.down: nn.Module = RowParallelLinear(inner, DIM, input_is_parallel=True)
            self.gathered: nn.Module = ColumnParallelLinear(DIM, 5)
            self.split: nn.Module = RowParallelLinear(5, 3, bias=False)
        else:
            self.words = nn.Embedding(WORDS, DIM, padding_idx=7)
            self.up, self.down = nn.Linear(DIM, inner), nn.Linear(inner, DIM)
            self.gathered, self.split = nn.Linear(DIM, 5), nn.Linear(5, 3, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.words(ids)
        rows = self.norm(rows + self.down(self.up(rows).relu()))
        return self.split(self.gathered(rows).tanh()).mean(1)  # type: ignore[no-any-return]


def made(inner: int = 8, parallel: bool = True) -> Net:
    torch.manual_seed(3)
    return Net(inner, parallel)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(index)
    return torch.randint(0, WORDS, (4, 5), generator=random), torch.randn(4, 3, generator=random)


def train(settings: dict[str, Any], inner: int = 8, steps: int = 3, clip: float = 0.0) -> dict[str, Any]:
    """Losses, and the whole parameters after some steps; ranks of the model axis read one batch."""
    strategy = fleet.DistributedStrategy(tensor_parallel=True, **settings)
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(made(inner))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses: dict[str, float] = {}
    for step in range(steps):
        ids, target = batch(step + 10 * fleet.data_shard()[0])
        loss = (model(ids) - target).square().mean()
        losses[f"loss.{step}"] = float(loss.detach())
        loss.backward()
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        if clip:
            losses[f"norm.{step}"] = float(optimizer.grad_norm)
        optimizer.zero_grad()
    own = sum(
        parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
        for parameter in model.parameters()
    )
    state = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }
    shapes = {f"shape.{name}": str(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    fleet.stop_worker()
    return {**losses, **shapes, **{f"state.{name}": value for name, value in state.items()}, "own": own}


def alone(inner: int = 8, replicas: int = 1, steps: int = 3, merged: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """Dense layers in one process."""
    model = made(inner, parallel=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: dict[str, float] = {}
    for step in range(steps):
        each = []
        for replica in range(replicas):
            ids, target = batch(step + 10 * replica)
            each.append((model(ids) - target).square().mean())
        losses[f"loss.{step}"] = float(each[0].detach())
        (torch.stack(each).mean() / merged).backward()
        if (step + 1) % merged == 0:
            if clip:
                losses[f"norm.{step}"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
    shapes = {f"shape.{name}": str(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    return {**losses, **shapes, **{f"state.{name}": value for name, value in model.state_dict().items()}}


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert set(found) - {"own"} == set(expected)
    for name, value in expected.items():
        if isinstance(value, str):
            assert found[name] == value
        else:
            torch.testing.assert_close(
                found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def configs(degree: int) -> dict[str, Any]:
    return {"tensor_parallel_configs": {"tensor_parallel_degree": degree}}


def test_layers_in_one_process_are_torchs() -> None:
    parallel, dense = made(), made(parallel=False)
    for name, value in dense.state_dict().items():
        assert torch.equal(parallel.state_dict()[name], value)
    assert torch.equal(parallel(batch(0)[0]), dense(batch(0)[0]))


@pytest.mark.parametrize(("size", "inner"), [(2, 8), (2, 7), (3, 5)])  # 7 and 5 cannot be cut into equal shards
def test_parallel_layers_equal_dense_ones(ranks: Ranks, size: int, inner: int) -> None:
    expected = alone(inner)
    for found in ranks.run(train, size, settings=configs(size), inner=inner):
        same(found, expected)


def test_every_rank_has_its_shards_alone(ranks: Ranks) -> None:
    whole = sum(parameter.numel() for parameter in made().parameters())
    cut = sum(
        parameter.numel() for name, parameter in made().named_parameters() if "norm" not in name and name != "down.bias"
    )
    results = ranks.run(train, 2, settings=configs(2), inner=8, steps=0)
    assert sum(found["own"] for found in results) == whole * 2 - cut


@pytest.mark.parametrize("extra", first_of(["sharded", "data", "merged", "clipped"]))
def test_parallel_layers_compose(ranks: Ranks, extra: str) -> None:
    """2 × 2 ranks: gradients averaged over two batches, gathered over two steps, clipped by the norm of all shards."""
    settings: dict[str, Any] = configs(2)
    if extra == "merged":
        settings |= {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    if extra == "sharded":
        settings |= {"sharding": True, "sharding_configs": {"stage": 1}}
    clip = 0.05 if extra == "clipped" else 0.0
    expected = alone(replicas=2, steps=4, merged=2 if extra == "merged" else 1, clip=clip)
    results = ranks.run(train, 4, settings=settings, steps=4, clip=clip)
    same(results[0], expected)
    for found in results:
        same({**found, **{name: expected[name] for name in expected if "loss" in name}}, expected)


def train_lists(kernel: str) -> dict[str, Any]:
    """AdamW of one group with parameters that are cut and others, by torch's functions for lists of tensors."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(tensor_parallel=True, **configs(2)))
    model = fleet.distributed_model(made())
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, **{kernel: True})
    optimizer, groups = fleet.distributed_optimizer(inner), list(inner.param_groups)
    assert groups[0][kernel]
    steps = 0
    for ids, target in map(batch, range(3)):
        (model(ids) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += all(group is own for group, own in zip(optimizer.param_groups, groups, strict=True))
    whole = {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for name, parameter in model.named_parameters()
    }
    return {"steps": steps, **{name: parameter.detach() for name, parameter in whole.items()}}


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_lists_of_tensors_are_stepped_on_at_once(ranks: Ranks, kernel: str) -> None:
    model = made(parallel=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for ids, target in map(batch, range(3)):
        (model(ids) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(train_lists, 2, kernel=kernel):
        assert found.pop("steps") == 3
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), **EXACT)


def refused(kind: str) -> dict[str, Any]:
    """The text of the error that a mistake gives."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(tensor_parallel=True, **configs(2)))
    try:
        if kind == "dense":
            fleet.distributed_model(made(parallel=False))
        elif kind == "small":
            fleet.distributed_model(VocabParallelEmbedding(1, 4))
        else:
            model = fleet.distributed_model(VocabParallelEmbedding(WORDS, 4))
            if dist.get_rank() == 1:  # the other would wait for its sum
                model(torch.tensor([WORDS]))
    except (ModelError, IndexError) as error:
        return {"text": str(error)}
    finally:
        fleet.barrier_worker()  # a rank that left early would take the other's connections with it
    return {"text": "nothing"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("dense", "no layer that can be cut: use fleet.nn.ColumnParallelLinear"),
        ("small", "1 rows over 2 ranks leave a rank without any"),
        ("index", "index out of range"),
    ],
)
def test_mistakes_are_named(ranks: Ranks, kind: str, text: str) -> None:
    assert text in ranks.run(refused, 2, kind=kind)[1]["text"]


def train_in_pipeline() -> dict[str, Any]:
    """Two stages of two ranks each."""
    settings = {"pipeline_configs": {"accumulate_steps": 2}, "hybrid_configs": {"pp_degree": 2, "mp_degree": 2}}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(tensor_parallel=True, pipeline=True, **settings))
    model = fleet.distributed_model(in_a_row(parallel=True))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        model.train_batch(*rows(step), loss_of)
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }
    fleet.stop_worker()
    return {**state, "norm": float(optimizer.grad_norm)}


def in_a_row(parallel: bool) -> nn.Sequential:
    torch.manual_seed(4)
    if not parallel:
        inner = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 3))
        return nn.Sequential(inner, nn.LayerNorm(3), nn.Linear(3, 3))
    up, down = ColumnParallelLinear(DIM, 8, gather_output=False), RowParallelLinear(8, 3, input_is_parallel=True)
    return nn.Sequential(nn.Sequential(up, nn.ReLU(), down), nn.LayerNorm(3), ColumnParallelLinear(3, 3))


def rows(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(index)
    return torch.randn(4, DIM, generator=random), torch.randn(4, 3, generator=random)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def test_parallel_layers_in_a_pipeline_and_the_norm_over_all_of_it(ranks: Ranks) -> None:
    results = ranks.run(train_in_pipeline, 4)
    model = in_a_row(parallel=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, target = rows(step)
        loss_of(model(inputs), target).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    for first in (0, 1):
        found = {**results[first], **results[first + 2]}
        assert found.pop("norm") == pytest.approx(norm, rel=1e-6)
        assert set(found) == set(model.state_dict())
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, **EXACT)
