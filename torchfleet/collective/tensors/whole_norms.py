"""Norms of whole tensors from the ranks' shards: many at once, on the device, without waiting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchfleet.base.errors import FleetError
from torchfleet.collective.tensors.local_tensors import shard


def whole_norms(shards: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of whole tensors of which this rank has `shards`, sharded as `parameters` are; a vector.

    Ranks with shards of the same tensor call it together. In float32, or float64 if a shard is.
    """
    return summed_over_ranks(shard_norms(shards).square(), parameters).sqrt()


def shard_norms(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each of this rank's tensors; a vector. Each dtype separately: torch's fast kernels take one dtype."""
    types = {shard.dtype for shard in shards}
    kind = torch.float64 if torch.float64 in types else torch.float32
    if len(types) == 1 and all(map(torch.Tensor.numel, shards)):
        return torch.stack(torch._foreach_norm(list(shards), 2, kind))
    found = list(torch.zeros(len(shards), dtype=kind, device=shards[0].device).unbind())
    for dtype in types:
        places = [place for place, shard in enumerate(shards) if shard.dtype == dtype and shard.numel()]
        some = [shards[place] for place in places]
        for place, norm in zip(places, torch._foreach_norm(some, 2, kind) if some else (), strict=True):
            found[place] = norm
    return torch.stack(found)


def summed_over_ranks(squares: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum `squares`, a number for this rank's shard of each parameter, over the shards; an all-reduce per mesh axis."""
    if not are_cut(parameters):
        return squares
    cut: dict[dist.ProcessGroup, list[int]] = {}
    for place in [place for place, parameter in enumerate(parameters) if isinstance(parameter, DTensor)]:
        for mesh, dim in cutting_axes(parameters[place]):
            cut.setdefault(mesh.get_group(dim), []).append(place)
    each = list(squares.unbind())
    for group, places in cut.items():
        sums = torch.stack([each[place] for place in places])
        dist.all_reduce(sums, group=group)
        for place, total in zip(places, sums.unbind(), strict=True):
            each[place] = total
    return torch.stack(each)


def cutting_axes(parameter: torch.Tensor) -> Iterator[tuple[DeviceMesh, int]]:
    """The axes of its mesh along which a DTensor is sharded: all that are not replicated, as no parameter is partial.

    Not `is_shard()`: tensor_parallel and sharding together shard a dimension twice. torch calls that a strided shard,
    for which `is_shard()` depends on the version.
    """
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                yield parameter.device_mesh, dim


def num_shards(parameter: torch.Tensor) -> int:
    """The number of shards of a tensor over its mesh."""
    return math.prod(mesh.size(dim) for mesh, dim in cutting_axes(parameter)) if type(parameter) is DTensor else 1


def are_cut(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether any parameter is a DTensor."""
    return DTensor in set(map(type, parameters))


def local_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's shards of the gradients; all parameters must have one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if are_cut(parameters) or any(gradient.is_sparse for gradient in gradients):
        return [local_gradient(parameter) for parameter in parameters]
    return gradients


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the gradient, sharded as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise FleetError(
            "clipping, lars and lamb need dense gradients, found a sparse one: use Embedding(sparse=False)"
        )
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return shard(gradient)
