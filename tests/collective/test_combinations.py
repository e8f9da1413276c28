"""Strategies together, on 2 to 4 ranks: each combination trains, and equals a plainer one where it should."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grids import first_of
from support.ranks import Ranks
from torch.nn import functional as F

import torchfleet as fleet

pytestmark = pytest.mark.xdist_group("combinations")  # what several tests compare with is trained once

STEPS, ROWS, DIM, CLASSES = 8, 6, 12, 5

Trained = Callable[..., list[dict[str, Any]]]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            torch.nn.LayerNorm(DIM),
            torch.nn.Linear(DIM, 2 * DIM),
            torch.nn.Linear(2 * DIM, DIM),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(Block(), Block(), Block(), torch.nn.Linear(DIM, CLASSES))


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(replica: int, num_replicas: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A task that can be learned; every replica has its own share of every batch."""
    made = torch.Generator().manual_seed(3)
    directions = torch.randn(DIM, CLASSES, generator=made)
    batches = []
    for _ in range(STEPS):
        x = torch.randn(num_replicas * ROWS, DIM, generator=made)
        mine = slice(replica * ROWS, (replica + 1) * ROWS)
        batches.append((x[mine], (x @ directions).argmax(1)[mine]))
    return batches


def train(optimizer: str = "momentum", replicas: int = 0, **fields: Any) -> dict[str, Any]:
    """Losses of the last stage's ranks, and the parameters this rank has, whole."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    rank, size = fleet.worker_index(), fleet.worker_num()
    model = fleet.distributed_model(make_model(seed=rank))
    stepping = fleet.distributed_optimizer(make_optimizer(optimizer, model))
    num = replicas or size
    losses = []
    for x, y in data(rank // (size // num), num):
        loss = model.train_batch(x, y, F.cross_entropy)
        stepping.step()
        stepping.zero_grad()
        losses.append(math.nan if loss is None else float(loss))
    whole = {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().float().clone()
        for name, parameter in model.named_parameters()
    }
    fleet.stop_worker()
    return {"losses": losses, "parameters": whole}


@pytest.fixture(scope="module")
def trained(ranks: Ranks) -> Trained:
    """`train` on this number of ranks, with these arguments; once for all tests."""
    found: dict[str, list[dict[str, Any]]] = {}

    def run(size: int, **arguments: Any) -> list[dict[str, Any]]:
        key = json.dumps([size, arguments], sort_keys=True)
        if key not in found:
            found[key] = ranks.run(train, size, **arguments)
        return found[key]

    return run


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]], atol: float) -> None:
    """Every parameter that any rank has; between them they have all."""
    whole = expected[0]["parameters"]
    assert {name for result in found for name in result["parameters"]} == set(whole)
    for result in found:
        for name, value in result["parameters"].items():
            torch.testing.assert_close(
                value, whole[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


AMP = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
FP16 = {"amp": True, "amp_configs": {"init_loss_scaling": 128.0}}
RECOMPUTE = {"recompute": True, "recompute_configs": {"checkpoints": ["0", "1", "2"]}}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("amp", [AMP, FP16], ids=["bfloat16", "float16"])
def test_amp_recompute_sharding_equals_amp(trained: Trained, stage: int, amp: dict[str, Any]) -> None:
    """1e-5: the same half precision products, but gradients are summed in another order and Adam divides by √v."""
    expected = trained(2, optimizer="adam", **amp)
    sharding = {"sharding": True, "sharding_configs": {"stage": stage}}
    found = trained(2, optimizer="adam", **amp, **RECOMPUTE, **sharding)
    assert_close(found, expected, 1e-4 if stage > 1 else 1e-6)
    assert found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.parametrize("amp", [AMP, FP16], ids=["bfloat16", "float16"])
def test_lamb_amp_gradient_merge(trained: Trained, amp: dict[str, Any]) -> None:
    """Merged over two batches, the first and last four of eight are four steps."""
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    found = trained(2, optimizer="adam", lamb=True, **amp, **merge)
    plain = trained(2, optimizer="adam", lamb=True, **merge)
    assert_close(found, plain, 0.02)  # bfloat16 has eight bits
    assert_close(found[1:], found[:1], 0)
    assert found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.parametrize("k", [1, 4])
def test_localsgd_amp(trained: Trained, k: int) -> None:
    found = trained(2, localsgd=True, localsgd_configs={"k_steps": k}, **AMP)
    expected = trained(2, **AMP)
    assert_close(found, expected, 1e-5 if k == 1 else 0.2)
    assert_close(found[1:], found[:1], 0)


def test_adaptive_localsgd_amp(trained: Trained) -> None:
    found = trained(2, adaptive_localsgd=True, adaptive_localsgd_configs={"init_k_steps": 2}, **AMP)
    assert found[0]["losses"][-1] < found[0]["losses"][0]


def test_dgc_momentum_small_parameters_travel_whole(trained: Trained) -> None:
    assert_close(trained(2, dgc=True), trained(2), 1e-6)


@pytest.mark.parametrize("mode", first_of(["1F1B", "F-then-B"]))
@pytest.mark.parametrize("amp", [{}, AMP, FP16], ids=["float32", "bfloat16", "float16"])
def test_pipeline_recompute_amp_equals_one_rank(trained: Trained, mode: str, amp: dict[str, Any]) -> None:
    expected = trained(1, **amp)
    pipeline = {"pipeline": True, "pipeline_configs": {"accumulate_steps": 3, "schedule_mode": mode}}
    found = trained(2, replicas=1, **pipeline, **RECOMPUTE, **amp)
    # In half precision a gradient of a micro-batch is rounded before it is added
    assert_close(found, expected, 2e-2 if amp else 1e-6)
    assert found[1]["losses"] == pytest.approx(expected[0]["losses"], abs=2e-2 if amp else 1e-5)
    assert all(math.isnan(loss) for loss in found[0]["losses"])


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_hybrid_sharding_equals_data_parallelism(trained: Trained, stage: int) -> None:
    hybrid = {"stage": stage, "sharding_degree": 2, "hybrid_dp": True}
    found = trained(4, optimizer="momentum", sharding=True, sharding_configs=hybrid)
    assert_close(found, trained(4, optimizer="momentum"), 1e-6)


def test_pipeline_beside_data_parallelism(trained: Trained) -> None:
    fields = {"pipeline": True, "pipeline_configs": {"accumulate_steps": 2}, "hybrid_configs": {"pp_degree": 2}}
    assert_close(trained(4, replicas=2, **fields), trained(2), 1e-6)


@pytest.mark.parametrize("pure", ["use_pure_fp16", "use_pure_bf16"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.long), 3])
def test_pure_parameters_under_sharding(trained: Trained, pure: str, stage: int) -> None:
    sharding = {"sharding": True, "sharding_configs": {"stage": stage}} if stage else {}
    fields = {"amp": True, "amp_configs": {pure: True}}
    found = trained(2, optimizer="adam", **fields, **sharding)
    expected = trained(2, optimizer="adam", **fields)
    assert_close(found, expected, 1e-6 if stage < 2 else 0.02)
    assert found[0]["losses"][-1] < found[0]["losses"][0]


def test_lars_amp_sharding_merge(trained: Trained) -> None:
    fields = {**AMP, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "lars": True}
    expected = trained(2, **fields)
    for stage in (1, 2, 3):
        found = trained(2, sharding=True, sharding_configs={"stage": stage}, **fields)
        assert_close(found, expected, 1e-5)


def test_ways_to_exchange_beside_amp_and_merge(trained: Trained) -> None:
    """float16 on the wire has eleven bits."""
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    expected = trained(4, **AMP, **merge)
    ways: list[tuple[dict[str, Any], float]] = [
        ({"fp16_allreduce": True}, 1e-3),
        ({"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}, 1e-5),
        ({"nccl_comm_num": 2, "sync_nccl_allreduce": False, "fuse_grad_size_in_MB": 1}, 1e-5),
    ]
    for way, atol in ways:
        assert_close(trained(4, **AMP, **merge, **way), expected, atol)
