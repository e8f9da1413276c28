"""This rank's shards of tensors that are sharded over ranks, and parameters that are each rank's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself. Detached; it shares the memory of `tensor`."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:  # hasattr is slow for what is not there
        return tensor.detach()
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, any other tensor itself; for work without gradients, hundreds of times a step."""
    return tensor.to_local() if type(tensor) is DTensor else tensor


def shards(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`shard` of each: to be changed in place where no gradients are noted."""
    return [shard(tensor) for tensor in tensors]


def is_local(parameter: torch.Tensor) -> bool:
    """Whether the parameter is each rank's own (marked `fleet_local` by its layer) and never exchanged."""
    return bool(getattr(parameter, "fleet_local", False))


def dealt(parameters: Iterable[torch.Tensor], loads: list[int]) -> dict[torch.Tensor, int]:
    """Who steps on which parameter: the largest first, each goes to who has least. The same on all ranks.

    `loads` are the numbers of elements that each has already; they are brought up to date.
    """
    owners: dict[torch.Tensor, int] = {}
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):  # sorting keeps the order of equal ones
        owners[parameter] = loads.index(min(loads))
        loads[owners[parameter]] += parameter.numel()
    return owners
