"""Ways to average gradients: in two levels, through several communicators, in half precision."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collective_oracles import alone, assert_close, batches, job_of, mlp, train, values
from support.messages import naming
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import StrategyError
from torchfleet.collective.strategies.hierarchical import HierarchicalAllReduce


def train_on_ranks(**fields: Any) -> dict[str, Any]:
    """A model of several buckets, of 1 MB each."""
    job = job_of(fuse_grad_size_in_MB=1, **fields)
    rank, size = job.world.rank, job.world.size
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(64, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600), torch.nn.Tanh()]
    model = job.distribute_model(torch.nn.Sequential(*layers, torch.nn.Linear(600, 4)))
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(model, optimizer, batches(4, rank, size))
    return values(model)


def watched(name: str, seen: list[Any]) -> None:
    """From now on `seen` gets the group of every call of that function of torch.distributed."""
    function = getattr(dist, name)

    def watching(*args: Any, **kwargs: Any) -> Any:
        seen.append((name, kwargs.get("group")))
        return function(*args, **kwargs)

    setattr(dist, name, watching)


def train_in_two_levels(**fields: Any) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two machines
    plain = train_on_ranks()
    seen: list[Any] = []
    for name in ("reduce", "all_reduce", "broadcast"):
        watched(name, seen)
    found = train_on_ranks(use_hierarchical_allreduce=True, **fields)
    assert_close(found, plain, atol=1e-6)  # the sums are in another order
    sizes = {name: {dist.get_world_size(group) for called, group in seen if called == name} for name, _ in seen}
    return {**{name: sorted(each) for name, each in sizes.items()}, **found}


@pytest.mark.parametrize("fields", [{}, {"hierarchical_allreduce_inter_nranks": 2}])
def test_two_levels_equal_a_flat_all_reduce(ranks: Ranks, fields: dict[str, Any]) -> None:
    """By itself the switch takes the ranks of a machine."""
    results = ranks.run(train_in_two_levels, 4, **fields)
    for rank, found in enumerate(results):
        assert_close(found, results[0], atol=0)
        assert found["reduce"] == found["broadcast"] == [2]
        assert found.get("all_reduce", []) == ([2] if rank in (0, 2) else [])  # leaders only


def train_flat() -> dict[str, Any]:
    plain = train_on_ranks()
    for node_size in (1, 2):
        found = train_on_ranks(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=node_size)
        assert_close(found, plain, atol=0)
    return {}


def test_nodes_of_one_rank_and_one_node_of_all_are_flat(ranks: Ranks) -> None:
    ranks.run(train_flat, 2)


def test_nodes_must_be_of_equal_size() -> None:
    strategy, world = alone(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=4)
    world.size = 6
    with pytest.raises(StrategyError, match=naming("hierarchical_allreduce_inter_nranks=4", 6)):
        HierarchicalAllReduce(strategy, world)
    by_itself, world.local_size = fleet.DistributedStrategy(use_hierarchical_allreduce=True), 4
    with pytest.raises(StrategyError, match=naming("LOCAL_WORLD_SIZE=4", 6)):
        HierarchicalAllReduce(by_itself, world)
    world.local_size = 0
    with pytest.raises(
        StrategyError,
        match=naming("LOCAL_WORLD_SIZE", "hierarchical_allreduce_inter_nranks"),
    ):
        HierarchicalAllReduce(by_itself, world)


def train_when_a_rank_is_gone() -> dict[str, Any]:
    """Rank 3 leaves; what the exchange meets in its thread must reach the thread that waits for the gradients."""
    fields = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2, "sync_timeout": 60.0}
    job = job_of(**fields)
    model = job.distribute_model(mlp())
    dist.barrier()  # until then others make their groups, and one that is gone would fail them there
    if job.world.rank == 3:
        return {"error": ""}
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 64)).sum().backward()
    return {"error": str(caught.value)}


def test_an_error_of_the_exchange_reaches_the_training(ranks: Ranks) -> None:
    for found in ranks.run(train_when_a_rank_is_gone, 4)[:3]:
        assert found["error"]


def train_through_several(count: int) -> dict[str, Any]:
    plain = train_on_ranks()
    seen: list[Any] = []
    watched("all_reduce", seen)
    for waits in (True, False):
        seen.clear()
        found = train_on_ranks(nccl_comm_num=count, sync_nccl_allreduce=waits)
        assert_close(found, plain, atol=0)
        groups = [group for _, group in seen]
        assert len(set(groups)) == count
        assert groups == [groups[i % count] for i in range(len(groups))]
    return {"num_buckets": len(groups)}


def test_several_communicators_take_turns(ranks: Ranks) -> None:
    for found in ranks.run(train_through_several, 2, count=3):
        assert found["num_buckets"] > 3


def gradients_in_half() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, fields in {"half": {"fp16_allreduce": True}, "plain": {}}.items():
        job = job_of(**fields)
        model = job.distribute_model(mlp())
        (x, y), *_ = batches(1, job.world.rank, job.world.size)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        results[name] = model.module[0].weight.grad
    alone_model = mlp()
    torch.nn.functional.cross_entropy(alone_model(x), y).backward()
    return {**results, "own": alone_model[0].weight.grad}


def test_gradients_travel_in_half_precision(ranks: Ranks) -> None:
    first, second = ranks.run(gradients_in_half, 2)
    expected = (first["own"].half() / 2 + second["own"].half() / 2).float()
    for found in (first, second):
        assert found["half"].dtype == torch.float32
        assert_close(found, {"half": expected}, atol=0)
        torch.testing.assert_close(
            found["half"], found["plain"], rtol=2e-3, atol=1e-5
        )  # 11 bits, of terms that may cancel
        assert not torch.equal(found["half"], found["plain"])


def one_rank() -> dict[str, Any]:
    plain = train_on_ranks()
    for fields in ({"fp16_allreduce": True}, {"nccl_comm_num": 2}, {"use_hierarchical_allreduce": True}):
        assert_close(train_on_ranks(**fields), plain, atol=0)
    return {}


def test_one_rank_alone_exchanges_nothing(ranks: Ranks) -> None:
    ranks.run(one_rank, 1)


def threads_of_jobs() -> dict[str, Any]:
    """How many threads of the exchange there are in a job and after it, ended in both ways."""
    dist.init_process_group("gloo")
    found = {}
    for name, end in (("stop_worker", fleet.stop_worker), ("reset", fleet.reset)):
        fields = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
        model = fleet.distributed_model(mlp())
        model(torch.randn(2, 64)).sum().backward()
        own = [thread for thread in threading.enumerate() if thread.name == "hierarchical_allreduce"]
        end()
        for thread in own:
            thread.join(30.0)
        found[name] = [len(own), sum(thread.is_alive() for thread in own)]
    return found


def test_the_thread_of_the_exchange_ends_with_its_job(ranks: Ranks) -> None:
    for found in ranks.run(threads_of_jobs, 4):
        assert found == {"stop_worker": [1, 0], "reset": [1, 0]}
