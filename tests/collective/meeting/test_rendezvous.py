"""Jobs one after another in the same ranks: each has a process group of its own, in whatever order ranks come."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

import torchfleet as fleet

ROWS, TIMEOUT = 3, 30.0


def make_model(generation: int) -> torch.nn.Module:
    torch.manual_seed(generation)
    return torch.nn.Linear(4, 2)


def rows(generation: int, size: int) -> torch.Tensor:
    return torch.randn(size * ROWS, 4, generator=torch.Generator().manual_seed(100 + generation))


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def jobs_in_turn(late: list[int], agent_port: int = 0) -> dict[str, Any]:
    """A job for each of `late`, the rank that comes to it 1.5 s after the others; -1: none."""
    if agent_port:  # as under fleetrun: the launcher serves the store
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent_port))
    found, rank = {}, int(os.environ["RANK"])
    for generation, late_rank in enumerate(late):
        time.sleep(1.5 if rank == late_rank else 0.0)
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(sync_timeout=TIMEOUT))
        model = fleet.distributed_model(make_model(generation))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        step(model, optimizer, rows(generation, fleet.worker_num())[rank * ROWS : (rank + 1) * ROWS])
        found[f"weight {generation}"] = model.module.weight.detach().clone()
        fleet.stop_worker()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))  # a group of the script's own may follow
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return {**found, "total": float(total)}


def assert_all_trained(found: list[dict[str, Any]], num: int) -> None:
    for generation in range(num):
        model = make_model(generation)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), rows(generation, len(found)))
        for each in found:
            torch.testing.assert_close(each[f"weight {generation}"], model.weight.detach(), rtol=0, atol=1e-6)
    assert [each["total"] for each in found] == [sum(range(len(found)))] * len(found)


@pytest.mark.parametrize(("size", "late"), [(4, [-1, -1, -1]), (2, [-1, 0])])
def test_jobs_in_turn_train_as_one_process_does(ranks: Ranks, size: int, late: list[int]) -> None:
    assert_all_trained(ranks.run(jobs_in_turn, size, late=late), len(late))


def test_the_store_of_a_launcher_serves_several_jobs(ranks: Ranks) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert_all_trained(ranks.run(jobs_in_turn, 4, late=[-1, 0], agent_port=store.port), 2)
