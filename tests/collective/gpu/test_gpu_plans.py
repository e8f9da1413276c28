"""A model of transformers cut by its preset, on a GPU: two ranks on one over gloo, against one process on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extras import needing
from support.planned_models import alone, loss_of, made
from support.ranks import Ranks

import torchfleet as fleet

pytestmark = [pytest.mark.gpu, needing("transformers")]


def train(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    os.environ.pop("FLEET_DEVICE", None)  # which keeps the ranks of other tests on the CPU
    os.environ["LOCAL_RANK"] = "0"  # NCCL takes one rank a GPU, gloo any number
    dist.init_process_group("gloo")
    strategy = fleet.DistributedStrategy(tensor_parallel=True, hybrid_configs={"mp_degree": 2}, **fields)
    fleet.init(is_collective=True, strategy=strategy)
    model: Any = fleet.distributed_model(made(kind).train())
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found: dict[str, Any] = {}
    for step in range(2):
        loss = loss_of(model, kind, step, "cuda")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss.{step}"] = float(loss.detach())
    return found


@pytest.mark.parametrize(("fields", "tolerance"), [({}, 1e-4), ({"amp": True}, 1e-2)], ids=["float32", "float16"])
def test_a_preset_on_a_gpu_makes_the_steps_of_one_process(
    ranks: Ranks, fields: dict[str, Any], tolerance: float
) -> None:
    expected = alone("llama")
    for found in ranks.run(train, 2, kind="llama", fields=fields):
        for name, value in found.items():
            assert value == pytest.approx(expected[name], rel=tolerance)
