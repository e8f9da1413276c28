"""Classes cut over ranks: which a rank has, their first values, and where they are in its shard of the logits."""

from __future__ import annotations

import math

import torch

_ROWS_PER_SEED = 1024


def class_range(num: int, rank: int, size: int) -> tuple[int, int]:
    """A rank's classes: as torch.chunk and DTensor cut, the last shards may be shorter or empty."""
    each = math.ceil(num / size)
    return min(num, each * rank), min(num, each * (rank + 1))


def first_values(first: int, past: int, dim: int, seed: int) -> torch.Tensor:
    """Normally distributed, the same for a class whoever holds it: every 1024 classes have a seed of their own."""
    blocks = [torch.empty(0, dim)]
    for block in range(first // _ROWS_PER_SEED, math.ceil(past / _ROWS_PER_SEED) if past > first else 0):
        random = torch.Generator().manual_seed((seed << 32) + block)
        rows = torch.empty(_ROWS_PER_SEED, dim).normal_(0.0, 0.01, generator=random)
        start = block * _ROWS_PER_SEED
        blocks.append(rows[max(first - start, 0) : past - start])
    return torch.cat(blocks)


class OwnClasses:
    """In a matrix (all samples, own classes) the place of each sample's class, if that is this rank's.

    Nothing depends on how many these are: a GPU is not waited for.
    """

    def __init__(self, labels: torch.Tensor, first: int, num: int) -> None:
        self._is_here = (labels >= first) & (labels < first + num)
        self._places = (labels - first).clamp(0, max(0, num - 1)).unsqueeze(1)

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The numbers at these places; 0 for samples of other ranks' classes."""
        if not matrix.shape[1]:
            return matrix.new_zeros(len(matrix))
        return matrix.gather(1, self._places).squeeze(1).where(self._is_here, 0.0)

    def put(self, matrix: torch.Tensor, values: torch.Tensor) -> None:
        """Into these places; where a sample's class is another rank's, nothing changes."""
        if matrix.shape[1]:
            present = matrix.gather(1, self._places).squeeze(1)
            matrix.scatter_(1, self._places, values.where(self._is_here, present).unsqueeze(1))
