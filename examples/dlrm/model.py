"""DLRM (Naumov et al. 2019): numbers through a bottom network, dot products of all pairs, a top network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

import torchfleet as fleet
from examples.columns import Columns
from examples.wide_deep.data import NUM_DENSE, NUM_SLOTS


class DLRM(torch.nn.Module):
    """Logits for a batch with `ids` (N, 26) and `dense` (N, 13). Ids are any 64-bit numbers: tables grow with them.

    The bottom network turns the numbers of a sample into one more vector beside those of its ids. The top network sees
    that vector, and how each pair of vectors goes together. `device`: of a table in this process (docs/gpu.md).
    """

    def __init__(
        self, dim: int = 8, bottom: Sequence[int] = (32,), top: Sequence[int] = (64, 32), device: str | None = None
    ) -> None:
        super().__init__()
        first = fleet.nn.Uniform(-0.05, 0.05)
        self.rows = fleet.nn.SparseEmbedding(dim, name="rows", initializer=first, device=device)
        self.bottom = torch.nn.Sequential(*_layers([NUM_DENSE, *bottom, dim]), torch.nn.ReLU())
        num_pairs = (NUM_SLOTS + 1) * NUM_SLOTS // 2
        self.top = torch.nn.Sequential(*_layers([dim + num_pairs, *top, 1]))

    def forward(self, batch: Columns) -> torch.Tensor:
        numbers = self.bottom(batch["dense"])
        vectors = torch.cat([numbers.unsqueeze(1), self.rows(batch["ids"])], dim=1)
        return self.top(torch.cat([numbers, pairwise_dots(vectors)], dim=1)).squeeze(1)


def pairwise_dots(vectors: torch.Tensor) -> torch.Tensor:
    """Dot products of all pairs of a sample's n vectors, each pair once; (N, n, dim) gives (N, n * (n - 1) / 2)."""
    products = vectors @ vectors.transpose(1, 2)
    left, right = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    return products[:, left, right]


def _layers(sizes: Sequence[int]) -> list[torch.nn.Module]:
    """Linear layers from size to size, with ReLU between them."""
    layers: list[torch.nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    return layers[:-1]
