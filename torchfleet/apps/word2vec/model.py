"""Skip-gram with negative sampling as a torch module, which trains in every mode with an ordinary loop."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.initializers import Constant, Uniform

TABLES = ("emb", "emb_w", "emb_b")


class SkipGram(torch.nn.Module):
    """s(w, o) = emb[w] · emb_w[o] + emb_b[o]; the loss of a pair is softplus(-s(w, o)) + Σ softplus(s(w, negative))."""

    def __init__(self, num_words: int, dim: int = 100, num_negatives: int = 5, seed: int = 0) -> None:
        super().__init__()
        self.num_negatives = num_negatives
        first = Uniform(-0.5 / dim, 0.5 / dim)
        self.emb = SparseEmbedding(dim, "emb", initializer=first, seed=seed, num_embeddings=num_words)
        self.emb_w = SparseEmbedding(dim, "emb_w", initializer=Constant(0.0), num_embeddings=num_words)
        self.emb_b = SparseEmbedding(1, "emb_b", initializer=Constant(0.0), num_embeddings=num_words)

    def forward(self, words: torch.Tensor, trues: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        """The mean loss of the pairs (words[i], trues[i]).

        `negatives` is (pairs, n), or (n,) when all pairs share them. However many they are, they count as
        `num_negatives` for every pair.
        """
        rows = self.emb(words)
        true_logits = (rows * self.emb_w(trues)).sum(dim=1) + self.emb_b(trues).squeeze(1)
        away, biases = self.emb_w(negatives), self.emb_b(negatives).squeeze(-1)
        products = rows @ away.T if negatives.dim() == 1 else (away @ rows.unsqueeze(2)).squeeze(2)
        share = self.num_negatives / negatives.shape[-1]
        loss: torch.Tensor = softplus(-true_logits) + share * softplus(products + biases).sum(dim=1)
        return loss.sum() / max(1, len(loss))  # a worker's share of a short batch may be empty
