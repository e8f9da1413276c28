"""Gradients averaged over the ranks that hold the same part of a model, for strategies that cut the model up.

    g = (1/n) · Σ_{r=1..n} g_r      over the ranks along the data and sharding axes

Gradients are put together into flat buffers of `fuse_grad_size_in_MB` (each by itself without `fuse_all_reduce_ops`),
each averaged by one all-reduce. Unlike DistributedDataParallel's, the exchange is not overlapped with backward: it
begins when all gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from torchfleet.collective.local_tensors import local
from torchfleet.collective.world import World
from torchfleet.errors import ModelError
from torchfleet.strategy.distributed_strategy import DistributedStrategy

REPLICAS = ("data", "sharding")  # the axes along which ranks hold the same, and read different data


class GradientAverage:
    """Averages gradients in place. Ranks along the axes call it together, with gradients of the same parameters."""

    def __init__(self, strategy: DistributedStrategy, world: World) -> None:
        axes = [world.axis(name) for name in REPLICAS]
        self._axes = [axis for axis in axes if axis.size > 1]
        self._bucket_bytes = strategy.fuse_grad_size_in_MB << 20 if strategy.fuse_all_reduce_ops else 0
        if strategy.sharding and strategy.sharding_configs["stage"] > 1:
            self._axes = []  # sharding averages them itself

    @property
    def is_needed(self) -> bool:
        return bool(self._axes)

    @torch.no_grad()
    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if not self._axes:
            return
        for bucket in self._buckets(_local_gradients(parameters)):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            for axis in self._axes:
                flat.div_(axis.size)  # before the sum, which could be too large for half precision
                dist.all_reduce(flat, group=axis.group)
            averages = flat.split([gradient.numel() for gradient in bucket])  # type: ignore[no-untyped-call]
            for gradient, average in zip(bucket, averages, strict=True):
                gradient.copy_(average.view_as(gradient))

    def _buckets(self, gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Neighbours of one type together, up to the size of a bucket; a larger gradient by itself."""
        bucket: list[torch.Tensor] = []
        size = 0
        for gradient in gradients:
            if bucket and (bucket[0].dtype != gradient.dtype or size + gradient.nbytes > self._bucket_bytes):
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        if bucket:
            yield bucket


def _local_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """This rank's own, in the order of their types: fewer buffers."""
    owned = [one for one in parameters if one.grad is not None and not getattr(one, "fleet_local", False)]
    for parameter in sorted(owned, key=lambda one: str(one.dtype)):  # sorting keeps the order of equal ones
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ModelError(
                "a sparse gradient (an embedding with sparse=True) cannot be averaged under pipeline or "
                "tensor_parallel: make the embedding with sparse=False"
            )
        yield local(gradient)
