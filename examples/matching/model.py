"""Semantic matching with bags of words: the cosine of a query and a title says how well they match."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from examples.columns import Columns
from examples.matching.data import NUM_WORDS


class Matching(torch.nn.Module):
    """Plain torch: `fleet.distributed_model` moves its sparse embedding to the servers.

    Query and titles share the table of words. Each has a layer of its own above it.
    """

    def __init__(self, dim: int = 16, num_words: int = NUM_WORDS) -> None:
        super().__init__()
        self.words = torch.nn.EmbeddingBag(num_words, dim, mode="sum", padding_idx=0, sparse=True)
        torch.nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.query, self.title = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)

    def query_vectors(self, bags: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.query(F.softsign(self.words(bags))), dim=1)

    def title_vectors(self, bags: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.title(F.softsign(self.words(bags))), dim=1)

    def forward(self, batch: Columns) -> torch.Tensor:
        """(N, 2): cosines of each query with the title that belongs to it, and with another one."""
        query = self.query_vectors(batch["query"])
        pair = [self.title_vectors(batch[name]) for name in ("title", "other")]
        return torch.stack([(query * title).sum(dim=1) for title in pair], dim=1)


def hinge(cosines: torch.Tensor, margin: float = 0.3) -> torch.Tensor:
    """The right title must be nearer than the other one, by a margin."""
    return F.relu(margin - cosines[:, 0] + cosines[:, 1]).mean()


def in_order(cosines: torch.Tensor) -> float:
    """The share of pairs whose right title is nearer than the other one; ties count half."""
    right, other = cosines.unbind(dim=1)
    return float(((right > other).float() + 0.5 * (right == other)).mean())
