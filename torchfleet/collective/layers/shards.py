"""Differentiable conversions between replicated and sharded tensors.

They come in pairs, each the backward of the other: `copied` (identity forward, a sum backward) and `summed`; `split`
and `gathered`. `own_blocks` has a backward of its own. Shards are those of torch.chunk along the last dimension: the
last ones may be shorter or empty.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchfleet.collective.layers.row_gathering import all_gather_single

Group = dist.ProcessGroup
Gradients = tuple[torch.Tensor | None, ...]


def own_shard(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded parameter; any other parameter itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    return _OwnShard.apply(parameter)  # type: ignore[no-any-return,no-untyped-call]


def copied(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensor itself; backward sums the ranks' gradients."""
    return _Copied.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def summed(shard: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' tensors; backward passes the gradient to each rank."""
    return _Summed.apply(shard, group)  # type: ignore[no-any-return,no-untyped-call]


def split(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's shard along the last dimension; backward gathers."""
    return _Split.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def gathered(shard: torch.Tensor, size: int, group: Group) -> torch.Tensor:
    """The whole last dimension, of length `size`, from the ranks' shards; backward takes this rank's shard."""
    return _GatheredShards.apply(shard, size, group)  # type: ignore[no-any-return,no-untyped-call]


def own_blocks(shard: torch.Tensor, num: int, group: Group) -> torch.Tensor:
    """This rank's columns of each of `num` matrices side by side, from its shard of all columns; backward returns them.

    With t ranks the columns are num·t blocks. Rank r has blocks num·r … num·r + num - 1, and gets r, t + r, 2t + r, ...
    """
    return _OwnBlocks.apply(shard, num, group)  # type: ignore[no-any-return,no-untyped-call]


class _OwnShard(torch.autograd.Function):
    """DTensor.to_local, with a gradient in the parameter's layout: torch copies a gradient in any other layout, in old
    versions the whole gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.cut = parameter.device_mesh, parameter.placements
        ctx.whole = {"shape": parameter.shape, "stride": parameter.stride()}
        shard = parameter.to_local()
        return shard.view_as(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return (DTensor.from_local(gradient.contiguous(), *ctx.cut, run_check=False, **ctx.whole),)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return _sum(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: Group) -> torch.Tensor:
        return _sum(shard, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return gradient, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.size = group, x.shape[-1]
        return _own(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return _gather(gradient, ctx.size, ctx.group), None


class _GatheredShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, size: int, group: Group) -> torch.Tensor:
        ctx.group = group
        return _gather(shard, size, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return _own(gradient, ctx.group), None, None


class _OwnBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, num: int, group: Group) -> torch.Tensor:
        ctx.num, ctx.group = num, group
        order, sent, received = _block_moves(num, group)
        return _joined(_exchange(_blocks(shard, num)[order], sent, received, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        order, sent, received = _block_moves(ctx.num, ctx.group)
        ordered = _exchange(_blocks(gradient, ctx.num), received, sent, ctx.group)
        blocks = torch.empty_like(ordered)
        blocks[order] = ordered
        return _joined(blocks), None, None


def _block_moves(num: int, group: Group) -> tuple[list[int], list[int], list[int]]:
    """The order in which this rank sends its blocks, and how many it sends to and receives from each rank."""
    rank, size = group.rank(), group.size()
    targets = [(num * rank + place) % size for place in range(num)]
    sources = [(place * size + rank) // num for place in range(num)]
    order = sorted(range(num), key=targets.__getitem__)
    return order, [targets.count(other) for other in range(size)], [sources.count(other) for other in range(size)]


def _blocks(x: torch.Tensor, num: int) -> torch.Tensor:
    """(num, ..., width): the blocks of columns, one after the other."""
    return x.reshape(*x.shape[:-1], num, -1).movedim(-2, 0).contiguous()


def _joined(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.movedim(0, -2).flatten(-2)


def _exchange(blocks: torch.Tensor, sent: list[int], received: list[int], group: Group) -> torch.Tensor:
    arrived = torch.empty_like(blocks)
    dist.all_to_all_single(arrived, blocks, received, sent, group=group)
    return arrived


def _sum(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own(x: torch.Tensor, group: Group) -> torch.Tensor:
    width = math.ceil(x.shape[-1] / group.size())
    start = min(width * group.rank(), x.shape[-1])
    return x[..., start : start + width].contiguous()


def _gather(shard: torch.Tensor, size: int, group: Group) -> torch.Tensor:
    """Gather shards, each padded to the length of the longest."""
    width = math.ceil(size / group.size())
    padded = torch.nn.functional.pad(shard, (0, width - shard.shape[-1])).contiguous()
    every = padded.new_empty((group.size() * padded.numel(),))
    all_gather_single(every, padded.view(-1), group=group)
    return torch.cat(list(every.view(group.size(), *padded.shape)), -1)[..., :size].contiguous()
