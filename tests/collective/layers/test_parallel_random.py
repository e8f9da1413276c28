"""Masks of ranks that share layers: different ones for what is cut over them, the same for what each of them holds."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from support.ranks import Ranks
from torch import nn
from torch.nn import functional as F

import torchfleet as fleet

NUM, DIM = 20_000, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = fleet.nn.ColumnParallelLinear(DIM, 4 * DIM, gather_output=False)
        self.own = fleet.nn.ParallelDropout(0.5)
        self.down = fleet.nn.RowParallelLinear(4 * DIM, DIM, input_is_parallel=True)
        self.common = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.common(self.down(self.own(self.up(x).relu())))


def masks() -> dict[str, torch.Tensor]:
    """Of 2 × 2 ranks: model axis × replicas, each of which has a seed of its own."""
    fleet.init(
        is_collective=True, strategy=fleet.DistributedStrategy(tensor_parallel=True, hybrid_configs={"mp_degree": 2})
    )
    torch.manual_seed(5 + fleet.data_shard()[0])
    made = {"common": F.dropout(torch.ones(NUM), 0.5), "cut": fleet.nn.ParallelDropout(0.5)(torch.ones(NUM))}
    with fleet.nn.parallel_random():
        made["again"] = torch.rand(NUM)
    made["after"] = torch.rand(4)
    made["not in training"] = fleet.nn.ParallelDropout(0.5).eval()(torch.ones(4))
    fleet.stop_worker()
    return made


def expected(seed: int, rank: int) -> dict[str, torch.Tensor]:
    """In one process, by what the page promises."""
    torch.manual_seed(seed)
    made = {"common": F.dropout(torch.ones(NUM), 0.5)}
    for name, draw in (("cut", lambda: F.dropout(torch.ones(NUM), 0.5)), ("again", lambda: torch.rand(NUM))):
        drawn = int(torch.randint(1 << 62, ()))
        before = torch.get_rng_state()
        torch.manual_seed(
            int.from_bytes(hashlib.blake2b(f"{drawn} {rank}".encode(), digest_size=8).digest(), "little") >> 1
        )
        made[name] = draw()
        torch.set_rng_state(before)
    return {**made, "after": torch.rand(4), "not in training": torch.ones(4)}


def test_masks_of_cut_activations_differ_and_others_are_the_same(ranks: Ranks) -> None:
    found = ranks.run(masks, 4)
    for rank, of_rank in enumerate(found):
        for name, value in expected(5 + rank // 2, rank % 2).items():
            assert torch.equal(of_rank[name], value), (rank, name)
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(found[one]["common"], found[other]["common"])
        agree = (found[one]["cut"] == found[other]["cut"]).float().mean()
        assert abs(float(agree) - 0.5) < 0.02  # five standard deviations of independent masks
    assert not torch.equal(found[0]["common"], found[2]["common"])
    assert torch.equal(fleet.nn.ParallelDropout(0.0)(torch.ones(3)), torch.ones(3))


def train(recompute: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"recompute": True, "recompute_configs": {"checkpoints": ["0", "1"]}} if recompute else {}
    strategy = fleet.DistributedStrategy(tensor_parallel=True, hybrid_configs={"mp_degree": 2}, **fields)
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(Block(), Block()))
    torch.manual_seed(1)
    x = torch.randn(6, DIM)
    outputs = model(x)
    outputs.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    made = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in gradients.items()}
    fleet.stop_worker()
    return {**made, "outputs": outputs.detach(), "after": torch.rand(1)}


def test_recompute_repeats_the_masks(ranks: Ranks) -> None:
    first, second = ranks.run(train, 2, recompute=False)
    for found in (second, *ranks.run(train, 2, recompute=True)):
        for name, value in first.items():
            assert torch.equal(found[name], value), name
