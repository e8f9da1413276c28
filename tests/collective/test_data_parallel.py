"""Buckets, views of them, and buffers, against plain arithmetic and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.collective_oracles import job_of
from support.messages import naming
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import StrategyError
from torchfleet.collective import data_parallel
from torchfleet.collective.data_parallel import bucket_bytes

MB = 1 << 20
LAYERS = 8  # of 1 MB each, and a small one at the start


def test_the_first_and_the_last_bucket_are_small() -> None:
    gradients = [300_000] * 40  # the first are those of the last layers
    assert bucket_bytes(gradients, 4 * MB, MB) == [1_200_000, 4_200_000, 4_200_000, 1_200_000, 1_200_000]
    assert bucket_bytes(gradients, 4 * MB, 2 * MB) == [1_200_000, 4_200_000, 4_500_000, 2_100_000]
    assert bucket_bytes([5 * MB, 5 * MB, 10], 4 * MB, MB) == [5 * MB, 5 * MB + 10]  # a layer is in one bucket
    assert bucket_bytes([10, 10], 4 * MB, MB) == [20]
    assert bucket_bytes([10, 10], 1, 1) == [10, 10]


def test_what_is_left_between_buckets_is_no_exchange_of_its_own() -> None:
    assert bucket_bytes([MB, 2000, MB], 32 * MB, MB) == [MB + 2000, MB]
    assert bucket_bytes([MB, MB - 1, MB], 32 * MB, MB) == [2 * MB - 1, MB]
    assert bucket_bytes([MB, MB, MB], 32 * MB, MB) == [MB, MB, MB]
    assert bucket_bytes([2000, MB], 32 * MB, MB) == [2000, MB]  # nothing before it


def sizes_of_buckets(**fields: Any) -> dict[str, Any]:
    """What torch says that it made, after it has seen the order of a backward pass."""
    job = job_of(**fields)
    layers = [torch.nn.Linear(64, 512, bias=False), *(torch.nn.Linear(512, 512, bias=False) for _ in range(LAYERS))]
    model = job.distribute_model(torch.nn.Sequential(*layers))
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(3):
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    data = model._parallel._get_ddp_logging_data()
    text = data["bucket_sizes" if fields.get("find_unused_parameters") else "rebuilt_bucket_sizes"]
    model(torch.ones(2, 64)).square().mean().backward()
    shared = len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()})
    return {"sizes": [int(size) for size in text.split(",")], "buckets": shared}


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"fuse_grad_size_in_MB": 3}, [1, 3, 3, 1.125]),
        ({"fuse_grad_size_in_MB": 3, "last_comm_group_size_MB": 0.1}, [1, 3, 3, 1, 0.125]),
        ({"fuse_grad_size_in_MB": 3, "find_unused_parameters": True}, [1, 3, 3, 1.125]),
        ({}, [1, 6, 1.125]),
    ],
)
def test_torch_makes_the_buckets_that_were_asked_for(ranks: Ranks, fields: dict[str, Any], sizes: list[float]) -> None:
    """Gradients lie in the buckets: there are as many pieces of memory."""
    if not data_parallel._TAKES_SIZES:
        if "last_comm_group_size_MB" in fields:
            pytest.skip("needs another torch")
        sizes = [1, 3, 3, 1.125] if fields else [1, 7.125]  # the last bucket is what is left
    for found in ranks.run(sizes_of_buckets, 2, **fields):
        assert found["sizes"] == [size * MB for size in sizes]
        assert found["buckets"] == len(sizes)


def test_a_last_bucket_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = fleet.DistributedStrategy(last_comm_group_size_MB=2.0)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half())
    wrapped = data_parallel.WrappedModel(layers, lambda x: x)
    monkeypatch.setattr(data_parallel, "_TAKES_SIZES", True)
    with pytest.raises(StrategyError, match=naming("last_comm_group_size_MB=2.0")):
        data_parallel._bucket_sizes(wrapped, strategy, False)
    monkeypatch.setattr(data_parallel, "_TAKES_SIZES", False)
    with pytest.raises(StrategyError, match=naming("last_comm_group_size_MB=2.0")):
        data_parallel._bucket_sizes(wrapped, strategy, False)


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(rank)) * (1 + rank)


def buffers_in_training() -> dict[str, Any]:
    job = job_of()
    rank = job.world.rank
    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    module[0].running_mean.fill_(float(rank))  # rank 0's reach everybody at the start
    model = job.distribute_model(module)
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x in inputs(rank):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    own = model.module[0].running_mean.clone()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 3))  # nothing is exchanged
    unchanged = torch.equal(own, model.module[0].running_mean)
    model.eval_batch(torch.ones(2, 3))
    return {"own": own, "unchanged": unchanged, "shared": model.module[0].running_mean.clone()}


def test_buffers_are_each_ranks_own_until_all_evaluate(ranks: Ranks) -> None:
    results = ranks.run(buffers_in_training, 2)
    for rank, found in enumerate(results):
        oracle = torch.nn.BatchNorm1d(3)
        for x in inputs(rank):
            oracle(x)
        torch.testing.assert_close(found["own"], oracle.running_mean)
        assert found["unchanged"]
        assert torch.equal(found["shared"], results[0]["own"])
