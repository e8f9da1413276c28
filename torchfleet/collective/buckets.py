"""Tensors put together into buckets, so that one collective operation serves many of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from torchfleet.collective.world import Axis


def buckets(tensors: Iterable[torch.Tensor], max_bytes: float = math.inf) -> Iterator[list[torch.Tensor]]:
    """Group tensors into buckets of one dtype, in order, of up to `max_bytes` each; a larger tensor has its own bucket.

    The buckets are the same on all ranks whose tensors have the same shapes and dtypes.
    """
    filling: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        kind = tensor.dtype
        if kind in filling and sizes[kind] + tensor.nbytes > max_bytes:
            yield filling.pop(kind)
        if kind not in filling:
            filling[kind], sizes[kind] = [], 0
        filling[kind].append(tensor)
        sizes[kind] += tensor.nbytes
    yield from filling.values()


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], axes: Sequence[Axis], max_bytes: float) -> None:
    """Replace tensors in place by their mean over the ranks along `axes`; one all-reduce per bucket and axis.

    All ranks along the axes call it together. Each axis must have more than one rank.
    """
    for bucket in buckets(tensors, max_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        for axis in axes:
            flat.div_(axis.size)  # before the sum, which could be too large for half precision
            dist.all_reduce(flat, group=axis.group)
        means = flat.split([tensor.numel() for tensor in bucket])  # type: ignore[no-untyped-call]
        torch._foreach_copy_(bucket, [mean.view_as(tensor) for mean, tensor in zip(means, bucket, strict=True)])
