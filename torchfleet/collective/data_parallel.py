"""Data parallelism: every rank computes on its own batch; gradients are averaged while backward still runs.

`fuse_all_reduce_ops` and `fuse_grad_size_in_MB` say how gradients are put together into buckets, each exchanged by one
all-reduce as soon as all its gradients are there (Li et al. 2020, PyTorch Distributed). The work is done by torch's
DistributedDataParallel. Composes with everything but strategies that cut the model up and exchange by themselves
(sharding stages 2 and 3, pipeline, tensor_parallel).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.parallel import DistributedDataParallel

from torchfleet.collective.buckets import buckets
from torchfleet.collective.local_tensors import is_local
from torchfleet.collective.strategy import Forward
from torchfleet.collective.world import World
from torchfleet.strategy.distributed_strategy import DistributedStrategy

_ALONE_MB = 1e-6  # a bucket of about a byte: every gradient travels by itself
_BESIDE_ROWS_MB = 1.0  # a network beside tables has a few megabytes
_BROADCAST_BYTES = 32 << 20


class WrappedModel(torch.nn.Module):
    """The model, called through the forwards that the strategies have wrapped around its own."""

    def __init__(self, module: torch.nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self.wrapped_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped_forward(*args, **kwargs)


def data_parallel(
    wrapped: WrappedModel, settings: DistributedStrategy, world: World, beside_rows: bool = False
) -> DistributedDataParallel:
    """All ranks start from rank 0's parameters. Parameters marked `fleet_local` are each rank's own.

    `beside_rows`: the model looks rows up. Its inputs stay where they are, as ids are read in host memory; buckets are
    small, so that the first ones travel while the rest of a small network is computed; gradients lie in the buckets.
    """
    own = [name for name, parameter in wrapped.named_parameters() if is_local(parameter)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, own)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(
        wrapped,
        device_ids=[world.local_rank] if world.device.type == "cuda" and not beside_rows else None,
        bucket_cap_mb=_bucket_mb(settings, beside_rows),
        find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=beside_rows,
    )


def _bucket_mb(settings: DistributedStrategy, beside_rows: bool) -> float:
    if not settings.fuse_all_reduce_ops:
        return _ALONE_MB
    is_open = beside_rows and settings.is_default("fuse_grad_size_in_MB")
    return _BESIDE_ROWS_MB if is_open else settings.fuse_grad_size_in_MB


def broadcast(model: torch.nn.Module, world: World) -> None:
    """Every rank takes rank 0's parameters and buffers, as DistributedDataParallel does when it is made.

    They are taken where they lie: those in host memory do not come to the GPU for it.
    """
    own = {id(parameter) for parameter in model.parameters() if is_local(parameter)}
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in own]
    in_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    elsewhere = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
    assert dist.group.WORLD is not None
    for group, lying in ((world.control, in_host), (dist.group.WORLD, elsewhere)):
        for bucket in buckets(lying):
            _broadcast_coalesced(group, bucket, _BROADCAST_BYTES, 0)


def together(loader: Iterable[Any], world: World) -> Iterator[Any]:
    """The loader's batches, for as long as every rank has one: ranks whose data is longer stop with the shortest.

    A rank that went on alone would wait for the others for ever.
    """
    batches = iter(loader)
    num_read = 0
    batch, has_one = _next(batches)
    while True:
        ended = torch.tensor(0 if has_one else 1)
        dist.all_reduce(ended, group=world.control)
        num_ended = int(ended)
        if num_ended:
            break
        yield batch
        num_read += 1
        batch, has_one = _next(batches)
    if has_one:
        print(
            f"fleet.prefetch: rank {world.rank} stops after {num_read} batches, with {num_ended} of {world.size} ranks "
            "out of data; its further batches of this epoch are left unread",
            flush=True,
        )


def _next(batches: Iterator[Any]) -> tuple[Any, bool]:
    try:
        return next(batches), True
    except StopIteration:
        return None, False
