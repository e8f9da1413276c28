"""DeepFM (Guo et al. 2017): a factorization machine and a network over the same embeddings, their logits added."""

from __future__ import annotations

import torch

import torchfleet as fleet
from examples.columns import Columns
from examples.wide_deep.data import NUM_DENSE, NUM_SLOTS


class DeepFM(torch.nn.Module):
    """Logits for a batch with `ids` (N, 26) and `dense` (N, 13). Ids are any 64-bit numbers: tables grow with them."""

    def __init__(self, dim: int = 8, hidden: int = 64) -> None:
        super().__init__()
        self.first = fleet.nn.SparseEmbedding(1, name="first", initializer=fleet.nn.Constant(0.0))
        self.second = fleet.nn.SparseEmbedding(dim, name="second", initializer=fleet.nn.Uniform(-0.05, 0.05))
        self.numbers = torch.nn.Linear(NUM_DENSE, 1)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(NUM_SLOTS * dim + NUM_DENSE, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, 1),
        )

    def forward(self, batch: Columns) -> torch.Tensor:
        ids, dense = batch["ids"], batch["dense"]
        vectors = self.second(ids)
        linear = self.first(ids).sum(dim=(1, 2)) + self.numbers(dense).squeeze(1)
        deep = self.network(torch.cat([vectors.flatten(1), dense], dim=1)).squeeze(1)
        return linear + pairs_of(vectors) + deep


def pairs_of(vectors: torch.Tensor) -> torch.Tensor:
    """The sum of the dot products of all pairs of a sample's vectors; (N, slots, dim) gives (N,).

    In time linear in the slots: the square of a sum is the squares and twice the products of all pairs.
    """
    return 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
