"""Wide & Deep (Cheng et al. 2016): a weight for every id, and a network over the ids' vectors, their logits added."""

from __future__ import annotations

import torch

import torchfleet as fleet
from examples.wide_deep.data import NUM_DENSE, NUM_SLOTS


class WideDeep(torch.nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.wide = fleet.nn.SparseEmbedding(1, name="wide", initializer=fleet.nn.Constant(0.0))
        self.deep = fleet.nn.SparseEmbedding(dim, name="deep", initializer=fleet.nn.Uniform(-0.01, 0.01))
        self.tower = torch.nn.Sequential(
            torch.nn.Linear(NUM_SLOTS * dim + NUM_DENSE, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)
        )

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        deep = self.tower(torch.cat([self.deep(ids).flatten(1), dense], dim=1)).squeeze(1)
        return deep + self.wide(ids).sum(dim=(1, 2))
