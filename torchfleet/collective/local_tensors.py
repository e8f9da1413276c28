"""This rank's shards of tensors that are sharded over ranks, and parameters that are each rank's own."""

from __future__ import annotations

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself. Detached; it shares the memory of `tensor`."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:  # hasattr is slow for what is not there
        return tensor.detach()
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_local(parameter: torch.Tensor) -> bool:
    """Whether the parameter is each rank's own (marked `fleet_local` by its layer) and never exchanged."""
    return bool(getattr(parameter, "fleet_local", False))
