"""Saves, classes, buckets and uneven data on a GPU: one rank with NCCL, or two ranks on one GPU with gloo."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.messages import names
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import WorkerMissing
from torchfleet.collective.checkpoint.snapshots import Snapshots
from torchfleet.collective.layers.margin_softmax import MarginSoftmax

pytestmark = pytest.mark.gpu


def on_the_gpu(backend: str) -> None:
    """The ranks of a test are otherwise on the CPU; with gloo several of them may have one GPU."""
    os.environ.update(FLEET_DEVICE="", LOCAL_RANK="0")
    torch.cuda.set_device(0)
    dist.init_process_group(backend)


def start(backend: str, model: torch.nn.Module, **fields: Any) -> tuple[Any, Any]:
    on_the_gpu(backend)
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    parallel = fleet.distributed_model(model)
    assert next(parallel.parameters()).is_cuda
    return parallel, fleet.distributed_optimizer(torch.optim.Adam(parallel.parameters(), lr=0.01))


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(8, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(16)]
    return torch.nn.Sequential(torch.nn.BatchNorm1d(256), *layers)


def save_both_ways(folder: str, backend: str) -> dict[str, Any]:
    model, optimizer = start(backend, network())
    for _ in range(2):
        step(model, optimizer)
    fleet.save(f"{folder}/at once")
    fleet.save(f"{folder}/beside", asynchronous=True)
    for _ in range(50):
        step(model, optimizer)
    fleet.save(f"{folder}/later", asynchronous=True)  # waits for the one before
    fleet.stop_worker()
    return {}


@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_a_save_from_a_gpu_is_what_it_was_when_it_began(ranks: Ranks, tmp_path: Path, size: int, backend: str) -> None:
    ranks.run(save_both_ways, size, folder=str(tmp_path), backend=backend)
    files = sorted((tmp_path / "at once" / "save-000001").iterdir())
    assert len(files) == size
    for file in files:
        assert file.read_bytes() == (tmp_path / "beside" / "save-000001" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "later" / "save-000001" / file.name).read_bytes()


def snapshot_of_work_under_way() -> dict[str, Any]:
    """Kernels that are still queued count; what is queued after it does not."""
    values = torch.zeros(1 << 24, device="cuda")
    layers = torch.randn(4096, 4096, device="cuda")
    snapshots, same, pinned = Snapshots(), [], []
    for number in (1.0, 2.0):
        for _ in range(20):
            layers = torch.tanh(layers @ layers)
        values.fill_(number)
        copies = snapshots.take({"values": values, "count": torch.tensor(3)})
        values.fill_(-1.0)
        same.append(bool((copies["values"] == number).all()) and int(copies["count"]) == 3)
        pinned.append(not copies["values"].is_cuda)
    return {"same": same, "pinned": pinned}


def test_a_snapshot_is_in_the_order_of_the_stream(ranks: Ranks) -> None:
    (found,) = ranks.run(snapshot_of_work_under_way, 1)
    assert found == {"same": [True, True], "pinned": [True, True]}


def waits_for_the_gpu() -> dict[str, Any]:
    on_the_gpu("nccl")
    fleet.init(is_collective=True)
    layer = MarginSoftmax(100, 16).to("cuda")
    features = torch.randn(32, 16, device="cuda", requires_grad=True)
    labels = torch.randint(100, (32,), device="cuda")
    layer(features, labels).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(features, labels).backward()
    torch.cuda.set_sync_debug_mode("default")
    return {"waits": [str(each.message) for each in caught if "synchroniz" in str(each.message)]}


def test_margin_softmax_waits_for_the_gpu_once(ranks: Ranks) -> None:
    (found,) = ranks.run(waits_for_the_gpu, 1)
    assert len(found["waits"]) == 1, found


def uneven() -> dict[str, Any]:
    model, optimizer = start("gloo", network())
    text, began = "", time.monotonic()
    try:
        for _ in range(2 + fleet.worker_index()):
            step(model, optimizer)
        fleet.barrier_worker()
    except (WorkerMissing, RuntimeError) as error:
        text = str(error)
    return {"text": text, "seconds": time.monotonic() - began}


def test_uneven_data_is_named_within_seconds(ranks: Ranks) -> None:
    first, second = ranks.run(uneven, 2)
    assert names(first["text"], "rank 1", "step 3", "rank 0", "fleet.barrier_worker()", 2)
    assert second["text"]
    assert max(first["seconds"], second["seconds"]) < 40


def train(**fields: Any) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    model, optimizer = start("gloo", network(), **fields)
    for _ in range(3):
        step(model, optimizer)
    gradients_are_views = model._parallel.gradient_as_bucket_view
    return {"views": gradients_are_views, **{name: value.cpu() for name, value in model.state_dict().items()}}


def test_two_ranks_with_the_same_data_train_as_one_process(ranks: Ranks) -> None:
    """1e-4: Adam divides by the root of gradients that are near 0."""
    torch.manual_seed(0)
    alone = network().cuda()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for _ in range(3):
        step(alone, optimizer)
    for found in ranks.run(train, 2, fuse_grad_size_in_MB=1):
        assert found.pop("views")
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value.cpu(), rtol=1e-4, atol=1e-4)
