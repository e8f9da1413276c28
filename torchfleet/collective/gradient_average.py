"""Data-parallel averaging of gradients during backward, for strategies that shard the model.

    g = (1/n) · Σ_{r=1..n} g_r      over the ranks along the data and sharding axes

Parameters are grouped into buckets of `fuse_grad_size_in_MB` (without `fuse_all_reduce_ops`, one per parameter), from
the last to the first, in the order in which backward reaches them. One all-reduce averages a bucket. It starts when the
gradients of the bucket, and of all buckets before it, are computed; backward continues meanwhile. Buckets with
parameters that got no gradient in a pass are averaged at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from torchfleet.base.errors import ModelError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.buckets import buckets
from torchfleet.collective.tensors.local_tensors import is_local, local
from torchfleet.collective.world import World


class GradientAverage:
    """Averages gradients in place. Ranks along the axes have the same parameters, and compute gradients of the same
    ones.

    Call `watch` once, and `begin` before every backward pass whose gradients are to be averaged. With `ends_itself` the
    average is complete at the end of the pass; otherwise call `finish` after it.
    """

    def __init__(self, settings: DistributedStrategy, world: World, ends_itself: bool) -> None:
        self._replicas = world.replicas
        self._bucket_bytes = settings.fuse_grad_size_in_MB << 20 if settings.fuse_all_reduce_ops else 0
        # From stage 2 on, sharding averages gradients itself.
        own = not (settings.sharding and settings.sharding_configs.stage > 1)
        self.is_needed = own and self._replicas.size > 1
        self._ends_itself, self._is_ending, self._is_open = ends_itself, False, False
        self._buckets: list[list[torch.nn.Parameter]] = []
        self._missing: list[set[torch.nn.Parameter]] = []  # parameters of each bucket without a gradient in this pass
        self._under_way: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of these parameters from now on, in every pass that `begin` announces."""
        if not self.is_needed:
            return
        watched = [parameter for parameter in parameters if parameter.requires_grad and not is_local(parameter)]
        shards = [local(parameter) for parameter in reversed(watched)]
        of_shard = {id(shard): parameter for shard, parameter in zip(shards, reversed(watched), strict=True)}
        for bucket in buckets(shards, self._bucket_bytes):
            self._buckets.append([of_shard[id(shard)] for shard in bucket])
        for parameter in watched:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def begin(self, is_exchanged: bool = True) -> None:
        """Announce a backward pass; `is_exchanged`: average its gradients, including those accumulated before it."""
        self._is_open, self._is_ending, self._under_way = is_exchanged and self.is_needed, False, []
        self._missing = [set(bucket) for bucket in self._buckets]

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._is_open:
            return
        if self._ends_itself and not self._is_ending:
            self._is_ending = True
            Variable._execution_engine.queue_callback(self.finish)
        for missing in self._missing[len(self._under_way) :]:
            missing.discard(parameter)
        while len(self._under_way) < len(self._buckets) and not self._missing[len(self._under_way)]:
            self._exchange(self._buckets[len(self._under_way)])

    @torch.no_grad()
    def _exchange(self, bucket: list[torch.nn.Parameter]) -> None:
        shards = [_shard(parameter) for parameter in bucket if parameter.grad is not None]
        work, flat = None, torch.empty(0)
        if shards:
            flat = torch.cat([shard.reshape(-1) for shard in shards])
            flat.div_(self._replicas.size)  # before the sum, which could be too large for half precision
            work = dist.all_reduce(flat, group=self._replicas.group, async_op=True)
        self._under_way.append((work, flat, shards))

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the average of all gradients. Does nothing if no pass is open."""
        if not self._is_open:
            return
        for bucket in self._buckets[len(self._under_way) :]:
            self._exchange(bucket)
        for work, flat, shards in self._under_way:
            if work is not None:
                work.wait()
                means = flat.split([shard.numel() for shard in shards])  # type: ignore[no-untyped-call]
                torch._foreach_copy_(shards, [mean.view_as(shard) for mean, shard in zip(means, shards, strict=True)])
        self.begin(self._ends_itself)  # another backward pass may follow without a forward pass


def _shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard of the gradient."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ModelError(
            "a sparse gradient (an embedding with sparse=True) cannot be averaged under pipeline or tensor_parallel: "
            "make the embedding with sparse=False"
        )
    return local(gradient)
