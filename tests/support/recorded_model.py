"""The model of the recorded saves, and its batches: the same numbers on every machine."""

from __future__ import annotations

import numpy as np
import torch

import torchfleet as fleet

STEPS = 6


class Model(torch.nn.Module):
    """An embedding with policies, one with a declared size, a converted one, a network and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = fleet.nn.SparseEmbedding(
            4, entry=fleet.CountFilterEntry(2), shrink=fleet.Shrink(delete_after_unseen_days=7.0)
        )
        self.days = fleet.nn.SparseEmbedding(2, num_embeddings=7)
        self.words = torch.nn.Embedding(20, 3, sparse=True)
        self.norm = torch.nn.BatchNorm1d(9)
        self.out = torch.nn.Linear(9, 1)

    def forward(self, items: torch.Tensor, days: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        found = torch.cat([self.items(items), self.days(days), self.words(words)], dim=1)
        return self.out(self.norm(found)).squeeze(1)


def batch_of(step: int) -> tuple[torch.Tensor, ...]:
    """(items, days, words, target) of a step."""
    dice = np.random.RandomState(step)  # whose numbers are the same for ever
    items = dice.randint(0, 12, 16).astype(np.int64) * 1_000_000_007
    target = dice.rand(16).astype(np.float32)
    return tuple(map(torch.from_numpy, (items, dice.randint(0, 7, 16), dice.randint(0, 20, 16), target)))
