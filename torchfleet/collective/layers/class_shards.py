"""Classes sharded over ranks: a rank's classes, their initial values, and their places in its shard of the logits."""

from __future__ import annotations

import math

import torch

_ROWS_PER_SEED = 1024


def class_range(num: int, rank: int, size: int) -> tuple[int, int]:
    """A rank's range of classes, sharded as by torch.chunk and DTensor: the last shards may be shorter or empty."""
    each = math.ceil(num / size)
    return min(num, each * rank), min(num, each * (rank + 1))


def first_values(first: int, past: int, dim: int, seed: int) -> torch.Tensor:
    """Normally distributed values, the same whichever rank holds a class: every 1024 classes have their own seed."""
    blocks = [torch.empty(0, dim)]
    for block in range(first // _ROWS_PER_SEED, math.ceil(past / _ROWS_PER_SEED) if past > first else 0):
        random = torch.Generator().manual_seed((seed << 32) + block)
        rows = torch.empty(_ROWS_PER_SEED, dim).normal_(0.0, 0.01, generator=random)
        start = block * _ROWS_PER_SEED
        blocks.append(rows[max(first - start, 0) : past - start])
    return torch.cat(blocks)


class OwnClasses:
    """The place of each sample's class in a matrix (all samples, own classes), if the class is on this rank.

    No shape depends on the number of such samples, so that the host does not wait for a GPU.
    """

    def __init__(self, labels: torch.Tensor, first: int, num: int) -> None:
        self._is_here = (labels >= first) & (labels < first + num)
        self._places = (labels - first).clamp(0, max(0, num - 1)).unsqueeze(1)

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The values at these places; 0 for samples whose class is on another rank."""
        if not matrix.shape[1]:
            return matrix.new_zeros(len(matrix))
        return matrix.gather(1, self._places).squeeze(1).where(self._is_here, 0.0)

    def put(self, matrix: torch.Tensor, values: torch.Tensor) -> None:
        """Write values to these places; rows of samples whose class is on another rank do not change."""
        if matrix.shape[1]:
            present = matrix.gather(1, self._places).squeeze(1)
            matrix.scatter_(1, self._places, values.where(self._is_here, present).unsqueeze(1))
