"""Rows in two parts: a short one for every id, and a long one for ids that are seen often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchfleet.base.errors import ModelError, TableError
from torchfleet.ps.tables.settings.policy import AdmissionEntry, CountFilterEntry, PredicateEntry, combined
from torchfleet.ps.tables.settings.spec import MAX_DIM
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_arguments import Ids
from torchfleet.ps.worker.embedding.embedding_settings import check_whole_number


class TwoPartEmbedding(torch.nn.Module):
    """Rows of `dim` numbers: an id gets the first `embedx_start` numbers at once, and the others when it is seen often.
    They are the embed_w and embedx of Paddle's accessors.

    An id gets the long part when its score reaches `embedx_threshold` if `entry` has fleet.ShowClickEntry, otherwise
    when it appears for the `embedx_threshold`-th time (in a lookup for training, counted once per batch). Until then
    the long part reads as zeros, learns nothing, and takes no memory but a count. The parts are two tables, `embed` and
    `embedx`, so an id travels twice. `settings` are arguments of SparseEmbedding, for both: name, initializer, shrink,
    optimizer, dtype...
    """

    def __init__(
        self,
        dim: int,
        embedx_threshold: float,
        embedx_start: int = 1,
        name: str | None = None,
        entry: AdmissionEntry | Sequence[AdmissionEntry] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        check_whole_number("dim", dim, 2, MAX_DIM)
        check_whole_number("embedx_start", embedx_start, 1, dim - 1)
        if settings.get("num_embeddings") is not None:
            raise ModelError(
                f"TwoPartEmbedding: embedx_threshold={embedx_threshold} is for ids without end, and num_embeddings="
                f"{settings['num_embeddings']} gives every id its whole row. Leave one of them out."
            )
        self.dim, self.embedx_threshold = dim, embedx_threshold
        self.embed = SparseEmbedding(embedx_start, name and f"{name}.embed", entry, **settings)
        later = _later(self.embed.entry, embedx_threshold)
        self.embedx = SparseEmbedding(dim - embedx_start, name and f"{name}.embedx", later, **settings)

    def forward(
        self, ids: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        parts = [part(ids, offsets, per_sample_weights) for part in (self.embed, self.embedx)]
        return torch.cat(parts, dim=-1)


def _later(entry: AdmissionEntry, threshold: Any) -> AdmissionEntry:
    """The entry of the long part: the short part's entry, combined with the threshold."""
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or (not entry.show and threshold != int(threshold)):
        expected = "a number" if entry.show else "a whole number of appearances"
        raise ModelError(f"TwoPartEmbedding(embedx_threshold=...): expected {expected}, found {threshold!r:.100}")
    try:
        if entry.show:
            return combined([entry, PredicateEntry(f"score >= {float(threshold)!r}")])
        return combined([entry, CountFilterEntry(int(threshold))])
    except TableError as error:
        raise ModelError(
            f"TwoPartEmbedding: embedx_threshold={threshold} is an entry of the long part, beside entry=...: {error}"
        ) from None
