"""This rank's shards of sharded tensors, and parameters that belong to each rank alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself. Detached; shares memory with `tensor`."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:  # hasattr is slow for missing attributes
        return tensor.detach()
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, any other tensor itself; fast, for use without gradients."""
    return tensor.to_local() if type(tensor) is DTensor else tensor


def shards(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`shard` of each tensor, to be changed in place without autograd."""
    return [shard(tensor) for tensor in tensors]


def is_local(parameter: torch.Tensor) -> bool:
    """Whether the parameter belongs to each rank alone (marked `fleet_local` by its layer) and is never exchanged."""
    return bool(getattr(parameter, "fleet_local", False))


def dealt(parameters: Iterable[torch.Tensor], loads: list[int]) -> dict[torch.Tensor, int]:
    """Assign parameters to ranks: largest first, each to the rank with the least load. All ranks get the same result.

    `loads` are the numbers of elements that each rank already has; they are updated.
    """
    owners: dict[torch.Tensor, int] = {}
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):  # a stable sort
        owners[parameter] = loads.index(min(loads))
        loads[owners[parameter]] += parameter.numel()
    return owners
