"""Models that are cut before they are moved, on a GPU: two ranks on one over gloo, and one rank over NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.collective.tensors.local_tensors import local

pytestmark = pytest.mark.gpu
WIDTH, BLOCKS = 512, 8
SLACK = 8 << 20  # bytes of workspaces and of one whole layer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = fleet.nn.ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False)
        self.dropout = fleet.nn.ParallelDropout(0.25)
        self.down = fleet.nn.RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(x))))


def made(meta: bool) -> nn.Module:
    torch.manual_seed(7)
    with torch.device("meta" if meta else "cpu"):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def begin(**fields: Any) -> None:
    """Both ranks on the first GPU: NCCL takes one rank a GPU, gloo any number."""
    os.environ.pop("FLEET_DEVICE", None)  # which keeps the ranks of other tests on the CPU
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo")
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))


def use_cublas() -> None:
    """Its workspaces, 32 MiB each on an H200, are no memory of the model."""
    layer = torch.nn.Linear(8, 8, device="cuda")
    (layer(torch.ones(4, 8, device="cuda")) @ layer.weight).sum().backward()


def rise(fields: dict[str, Any], meta: bool) -> dict[str, Any]:
    """Bytes of the GPU while the model is distributed, and bytes of this rank's part."""
    begin(**fields)
    use_cublas()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    is_measured = fields.get("pipeline_configs", {}).get("cut") == "measured"
    model = fleet.distributed_model(made(meta), dry_batch=torch.ones(4, WIDTH) if is_measured else None)
    peak = torch.cuda.max_memory_allocated() - before
    part = sum(local(parameter).nbytes for parameter in model.parameters())
    places = {str(parameter.device) for parameter in model.parameters()}
    return {"peak": peak, "part": part, "places": " ".join(places)}


@pytest.mark.parametrize("meta", [False, True], ids=["in_host", "meta"])
@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline"])
def test_a_gpu_never_holds_more_than_its_part(ranks: Ranks, kind: str, meta: bool) -> None:
    fields = {"tensor_parallel": {"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}}, "pipeline": {}}[kind]
    whole = sum(parameter.nbytes for parameter in made(False).parameters())
    for found in ranks.run(rise, 2, fields={kind: True, **fields}, meta=meta):
        assert found["places"] == "cuda:0"
        assert found["part"] < 0.51 * whole
        assert found["peak"] <= 1.1 * found["part"] + SLACK


@pytest.mark.parametrize("meta", [False, True], ids=["in_host", "meta"])
def test_a_dry_step_holds_one_block_at_a_time(ranks: Ranks, meta: bool) -> None:
    """Its parameters, their gradients, and what forward keeps of four samples."""
    block = sum(parameter.nbytes for parameter in made(False)[0].parameters())  # type: ignore[index]
    fields = {"pipeline": True, "pipeline_configs": {"cut": "measured"}}
    for found in ranks.run(rise, 2, fields=fields, meta=meta):
        assert found["places"] == "cuda:0"
        assert found["peak"] <= max(1.1 * found["part"], 2.1 * block) + SLACK


def train_parallel() -> dict[str, Any]:
    begin(tensor_parallel=True, hybrid_configs={"mp_degree": 2})
    model = fleet.distributed_model(made(True)).eval()  # no dropout: one process draws other masks
    first = {name: local(parameter).cpu().clone() for name, parameter in model.named_parameters()}
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    masks = fleet.nn.ParallelDropout(0.5)(torch.ones(4096, device="cuda")).cpu()
    common = F.dropout(torch.ones(4096, device="cuda"), 0.5).cpu()
    return {**first, "losses": losses, "masks": masks, "common": common}


def test_layers_cut_on_meta_train_on_a_gpu_as_one_process_does(ranks: Ranks) -> None:
    """First values are put together from the ranks' shards; plain torch goes on from there."""
    both = ranks.run(train_parallel, 2)
    model = made(False).cuda().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [found[name] for found in both]
            dim = next((d for d in range(parameter.dim()) if parts[0].shape[d] != parameter.shape[d]), None)
            parameter.copy_(parts[0] if dim is None else torch.cat(parts, dim))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    for step in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(found["losses"][step] == pytest.approx(float(loss.detach()), rel=1e-4) for found in both)
    first, second = both
    assert torch.equal(first["common"], second["common"])
    assert 0.4 < float((first["masks"] == second["masks"]).float().mean()) < 0.6  # independent of each other


def train_offloaded() -> dict[str, Any]:
    """One rank over NCCL: parameters, gradients and state in page-locked host memory."""
    os.environ.pop("FLEET_DEVICE", None)
    strategy = fleet.DistributedStrategy(sharding=True, sharding_configs={"stage": 3, "offload": True})
    fleet.init(is_collective=True, strategy=strategy)
    torch.zeros(1, device="cuda")
    with torch.device("meta"):
        bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))
    torch.cuda.reset_peak_memory_stats()
    model = fleet.distributed_model(bare)
    peak = torch.cuda.max_memory_allocated()
    first = {name: local(parameter).clone() for name, parameter in model.named_parameters()}
    is_pinned = all(local(parameter).is_pinned() for parameter in model.parameters())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.zero_grad()
    last = {f"last {name}": local(parameter) for name, parameter in model.named_parameters()}
    fleet.stop_worker()
    return {**first, **last, "peak": peak, "is_pinned": is_pinned}


def test_offloaded_parameters_train_as_plain_torch_does(ranks: Ranks) -> None:
    (found,) = ranks.run(train_offloaded, 1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))
    model.load_state_dict({name: found[name] for name in model.state_dict()})
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(3):
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[f"last {name}"], value.cpu(), rtol=1e-4, atol=1e-5)
    assert found["is_pinned"]
    assert found["peak"] <= SLACK  # of 16 MB
