"""BERT (Devlin et al. 2019) for masked language modelling, without the task of the next sentence.

The linear layers are those of fleet.nn that tensor_parallel can cut over ranks; without it they are torch's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from torchfleet.nn import ColumnParallelLinear, ParallelRandom, RowParallelLinear


class Size(NamedTuple):
    layers: int
    hidden: int
    heads: int

    @property
    def inner(self) -> int:
        return 4 * self.hidden


SIZES = {
    "tiny": Size(layers=2, hidden=64, heads=2),
    "small": Size(layers=4, hidden=256, heads=4),
    "base": Size(layers=12, hidden=768, heads=12),
    "large": Size(layers=24, hidden=1024, heads=16),
}
IGNORED = -100  # a label that does not count


class Output(NamedTuple):
    """A tuple, which torch's own tools look into: they must find the tensors that backward begins with."""

    loss: torch.Tensor | None
    logits: torch.Tensor | None


class Embeddings(nn.Module):
    def __init__(self, vocab_size: int, hidden: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.dropout(self.norm(self.word(input_ids) + self.position(position_ids)))


class Mixing(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)


class Attention(nn.Module):
    """Every word looks at all words of its sequence. Cut over ranks, each has some of the heads."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.head_width = size.hidden // size.heads
        self.query, self.key, self.value = (_column(size.hidden, size.hidden) for _ in range(3))
        self.mixing = ParallelRandom(Mixing(dropout))  # each rank drops its own numbers of its own heads
        self.output = RowParallelLinear(size.hidden, size.hidden, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._by_head(project(x)) for project in (self.query, self.key, self.value))
        return self.output(self.mixing(query, key, value).transpose(1, 2).flatten(2))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(size, dropout)
        self.inner = _column(size.hidden, size.inner)
        self.outer = RowParallelLinear(size.inner, size.hidden, input_is_parallel=True)
        self.norm1, self.norm2 = nn.LayerNorm(size.hidden, eps=1e-12), nn.LayerNorm(size.hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.outer(F.gelu(self.inner(x)))))


class Encoder(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(size, dropout) for _ in range(size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class Head(nn.Module):
    """Scores of all words of the vocabulary; with labels, the loss of each, so that recompute can do without scores."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden, eps=1e-12)
        self.decoder = nn.Linear(hidden, vocab_size)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.decoder(self.norm(F.gelu(self.dense(x))))
        if labels is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view_as(labels)


class Bert(nn.Module):
    """tied: the head's decoder is the table of word embeddings."""

    def __init__(
        self, size: Size, vocab_size: int, max_length: int = 512, dropout: float = 0.1, tied: bool = True
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocab_size, size.hidden, max_length, dropout)
        self.encoder = Encoder(size, dropout)
        self.head = Head(vocab_size, size.hidden)
        self.apply(self._init_weights)
        if tied:
            self.head.decoder.weight = self.embeddings.word.weight

    def _init_weights(self, module: nn.Module) -> None:
        """Also called for a model that was made without memory."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Output:
        """The loss, if there are labels, otherwise the scores: (batch, positions, vocabulary).

        `positions` (batch, number): where words are to be told; everywhere unless given. `labels` are the words there,
        or IGNORED. `position_ids`: where in their sequences the words of `input_ids` are, if context_parallel has cut
        them.
        """
        x = self.encoder(self.embeddings(input_ids, position_ids))
        if positions is not None:
            x = x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))
        if labels is None:
            return Output(None, self.head(x))
        return Output(self.head(x, labels).sum() / (labels != IGNORED).sum(), None)


def masked_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def _column(width: int, out: int) -> ColumnParallelLinear:
    return ColumnParallelLinear(width, out, gather_output=False)
