"""Data-parallel averaging of gradients after backward, for strategies that shard the model.

    g = (1/n) · Σ_{r=1..n} g_r      over the ranks along the data and sharding axes

Gradients are put together into flat buckets of `fuse_grad_size_in_MB` (each by itself without `fuse_all_reduce_ops`),
each averaged by one all-reduce. Unlike DistributedDataParallel's, the exchange is not overlapped with backward: it
begins when all gradients are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torchfleet.collective.buckets import average
from torchfleet.collective.local_tensors import is_local, local
from torchfleet.collective.world import World
from torchfleet.errors import ModelError
from torchfleet.strategy.distributed_strategy import DistributedStrategy

REPLICAS = ("data", "sharding")  # the axes along which ranks hold the same, and read different data


class GradientAverage:
    """Averages gradients in place. Ranks along the axes call it together, with gradients of the same parameters."""

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        axes = [world.axis(name) for name in REPLICAS]
        self._axes = [axis for axis in axes if axis.size > 1]
        self._bucket_bytes = settings.fuse_grad_size_in_MB << 20 if settings.fuse_all_reduce_ops else 0
        if settings.sharding and settings.sharding_configs.stage > 1:
            self._axes = []  # sharding averages them itself

    @property
    def is_needed(self) -> bool:
        return bool(self._axes)

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self._axes:
            average(_local_gradients(parameters), self._axes, self._bucket_bytes)


def _local_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """This rank's shards of the gradients that ranks have in common."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or is_local(parameter):
            continue
        if gradient.is_sparse:
            raise ModelError(
                "a sparse gradient (an embedding with sparse=True) cannot be averaged under pipeline or "
                "tensor_parallel: make the embedding with sparse=False"
            )
        yield local(gradient)
