"""All-gather and reduce-scatter of rows, when ranks have different numbers of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# The names of torch 2.13, or those of earlier versions, which 2.13 deprecates.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def stack(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(size, *shape): the tensors of all ranks."""
    if size == 1:
        return tensor.unsqueeze(0)
    stacked = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    all_gather_single(stacked, tensor.contiguous())
    return stacked.view(size, *tensor.shape)


def gather(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The tensors of all ranks, concatenated; `sizes` are their lengths."""
    if len(sizes) == 1:
        return tensor
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    every = stack(padded, len(sizes))
    return torch.cat([rows[:size] for rows, size in zip(every, sizes, strict=True)])


def scattered_sum(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The backward of `gather`: sums a tensor of all rows over the ranks, and returns this rank's rows."""
    rank = dist.get_rank()
    if dist.get_backend() == "gloo":  # not every version can reduce-scatter
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(tensor)
        return _split_rows(tensor, sizes)[rank]
    padded = tensor.new_zeros((len(sizes), max(sizes), *tensor.shape[1:]))
    for place, rows in zip(padded, _split_rows(tensor, sizes), strict=True):
        place[: len(rows)] = rows
    own = torch.empty_like(padded[0])
    reduce_scatter_single(own, padded.flatten(0, 1))
    return own[: sizes[rank]]


def _split_rows(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(tensor.split(sizes))  # type: ignore[no-untyped-call]
