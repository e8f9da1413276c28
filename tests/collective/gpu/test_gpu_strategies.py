"""Strategies on one GPU against plain torch on it: two ranks over gloo, four for what has two levels, one over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import gpu_cases
from support.collective_oracles import batches, dgc_training, mlp, train, values
from support.gpu_cases import CASES, DEVICE, DGC, on_one_gpu
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.nn import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.gpu

TOGETHER = ("data_parallel", "adam", "amp_bfloat16", "amp_float16", "pure_bfloat16", "recompute", "offload", "slices",
            "half_inputs", "lars", "lamb", "localsgd", "fp16_allreduce", "communicators", "gradient_merge",
            "sync_batch_norm", "fused_optimizer", "sharding_1", "sharding_1_amp")  # fmt: skip
ALONE = ("data_parallel", "amp_bfloat16", "amp_float16", "pure_bfloat16", "offload", "lamb", "sharding_1", "sharding_2",
         "sharding_3", "sharding_3_amp")  # fmt: skip
PIPED = ("pipeline", "pipeline_amp")


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> dict[str, list[dict[str, Any]]]:
    """Every start of ranks serves many cases: it takes seconds until a process has its GPU."""
    return {}


def outcomes(ranks: Ranks, found: dict[str, Any], size: int, names: tuple[str, ...], name: str) -> list[Any]:
    key = f"{size} {names}"
    if key not in found:
        found[key] = ranks.run(run, size, names=list(names))
    return [of_rank[name] for of_rank in found[key]]


def run(names: list[str]) -> dict[str, Any]:
    return gpu_cases.run_cases(names)


def assert_near(outcome: list[Any], name: str) -> None:
    for rank, off in enumerate(outcome):
        assert not isinstance(off, str), f"rank {rank}: {off}"
        assert off < CASES[name].tolerance, f"rank {rank} is {off:.1e} of the way from plain torch"


@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks_equal_plain_torch(ranks: Ranks, found: dict[str, Any], name: str) -> None:
    assert_near(outcomes(ranks, found, 2, TOGETHER, name), name)


@pytest.mark.parametrize("name", PIPED)
def test_two_stages_equal_plain_torch(ranks: Ranks, found: dict[str, Any], name: str) -> None:
    assert_near(outcomes(ranks, found, 2, PIPED, name), name)


def test_two_levels_of_ranks_equal_plain_torch(ranks: Ranks, found: dict[str, Any]) -> None:
    assert_near(outcomes(ranks, found, 4, ("hierarchical",), "hierarchical"), "hierarchical")


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_over_nccl_equals_plain_torch(ranks: Ranks, found: dict[str, Any], name: str) -> None:
    assert_near(outcomes(ranks, found, 1, ALONE, name), name)


# What compares in a way of its own


def train_compressed() -> dict[str, Any]:
    """In float64, so that the same values are the largest here and in the formulas on the CPU."""
    with on_one_gpu():
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**DGC))
        model = fleet.distributed_model(mlp(dtype=torch.float64))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        own = batches(4, fleet.worker_index(), 2, dtype=torch.float64)
        train(model, optimizer, [(x.to(DEVICE), y.to(DEVICE)) for x, y in own])
        fleet.stop_worker()
        return {name: value.cpu() for name, value in values(model.module).items()}


def test_compressed_gradients_follow_the_formulas(ranks: Ranks) -> None:
    expected = mlp(dtype=torch.float64)
    data = [batches(4, rank, 2, dtype=torch.float64) for rank in range(2)]
    list(dgc_training(expected, data, [0.0, 0.99, 0.99, 0.99], 0.1, 0.9, 0.0, 0.0))
    for result in ranks.run(train_compressed, 2):
        for name, value in values(expected).items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-9)


class Net(torch.nn.Module):
    def __init__(self, is_cut: bool) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.up = ColumnParallelLinear(64, 32, gather_output=False) if is_cut else linear(64, 32)
        self.down = RowParallelLinear(32, 64, input_is_parallel=True) if is_cut else linear(32, 64)
        self.last = linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


def local_parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Not gathered: over gloo torch's functional collectives end a process that gives them a GPU's memory."""
    return [(name, getattr(value, "_local_tensor", value)) for name, value in model.named_parameters()]


def shard(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """This rank's half of it, along the dimension in which the part is smaller."""
    cut = [dim for dim in range(whole.dim()) if part.shape[dim] < whole.shape[dim]]
    return whole.detach().chunk(2, cut[0])[fleet.worker_index()] if cut else whole.detach()


def train_cut_layers() -> dict[str, Any]:
    with on_one_gpu():
        data = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(4, 0, 1)]
        torch.manual_seed(1)
        plain = Net(is_cut=False).to(DEVICE)
        fields = {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 2}}
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
        mine = Net(is_cut=True)
        mine.load_state_dict(plain.state_dict())
        model = fleet.distributed_model(mine)
        train(model, fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01)), data)
        train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), data)
        off = {
            name: float((value.detach() - shard(plain.get_parameter(name), value)).abs().max())
            for name, value in local_parameters(model)
        }
        off["cut"] = sum(mine.shape != plain.get_parameter(name).shape for name, mine in local_parameters(model))
        fleet.stop_worker()
        return off


def test_layers_cut_over_two_ranks_equal_plain_ones(ranks: Ranks) -> None:
    for off in ranks.run(train_cut_layers, 2):
        assert off.pop("cut") == 3
        assert set(off) == {"up.weight", "up.bias", "down.weight", "down.bias", "last.weight", "last.bias"}
        assert max(off.values()) < 1e-4, off


def train_with_a_save(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Trained to the end, and once more from the save in the middle: the same values, bit for bit."""
    with on_one_gpu():
        ends = []
        for is_resumed in (False, True):
            fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
            model = fleet.distributed_model(mlp(seed=int(is_resumed)))
            optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
            own = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(4, fleet.worker_index(), fleet.worker_num())]
            if is_resumed:
                fleet.load(folder)
            else:
                train(model, optimizer, own[:2])
                fleet.save(folder)
            train(model, optimizer, own[2:])
            ends.append({name: gpu_cases.whole(value).cpu() for name, value in model.named_parameters()})
            fleet.stop_worker()
        return {"trained": ends[0], "resumed": ends[1]}


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (1, 3)], ids=["two_ranks", "nccl_stage_3"])
def test_a_save_goes_on_as_if_training_had_not_stopped(ranks: Ranks, tmp_path: Path, size: int, stage: int) -> None:
    fields = {**gpu_cases.FP16, "sharding": True, "sharding_configs": {"stage": stage}}
    for result in ranks.run(train_with_a_save, size, folder=str(tmp_path / "save"), fields=fields):
        for name, value in result["trained"].items():
            assert torch.equal(result["resumed"][name], value), name
