"""What a forward pass keeps for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

Storages = dict[int, torch.Tensor]  # storage → a tensor in it, which keeps it alive: its address is not used again


def storage_of(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def bytes_in(found: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors' storages, each of which counts once."""
    return sum({storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in found}.values())


@contextlib.contextmanager
def kept_for_backward(without: Iterable[torch.Tensor]) -> Iterator[Storages]:
    """The storages that autograd saves in this context, except those of the tensors `without`."""
    known = {storage_of(tensor) for tensor in without}
    kept: Storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if storage_of(tensor) not in known:
            kept[storage_of(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
