"""Layers that stand in for embeddings while a model is traced: a lookup becomes one operation of the graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_bag import SparseEmbeddingBag

_ROWS = "rows(Tensor ids, str table, int dim, int size, int? padding_idx) -> Tensor"
_POOLED = (
    "pooled(Tensor[] values, Tensor?[] offsets, Tensor? weights, str table, int dim, int size, int? padding_idx, "
    "str pooling) -> Tensor"
)


@functools.cache
def operations() -> Any:
    """Define the operations of lookups. They have no implementation: a graph with them is not run by torch."""
    library: Any = torch.library.Library("torchfleet", "DEF")  # type: ignore[no-untyped-call]
    library.define(_ROWS)
    library.define(_POOLED)
    library.impl("rows", _rows_like, "Meta")
    library.impl("pooled", _pooled_like, "Meta")
    return library


def _rows_like(ids: torch.Tensor, table: str, dim: int, size: int, padding_idx: int | None) -> torch.Tensor:
    return ids.new_empty((*ids.shape, dim), dtype=torch.float32)


def _pooled_like(
    values: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor | None],
    weights: torch.Tensor | None,
    table: str,
    dim: int,
    size: int,
    padding_idx: int | None,
    pooling: str,
) -> torch.Tensor:
    first = values[0] if offsets[0] is None else offsets[0]
    return first.new_empty((first.shape[0], len(values), dim), dtype=torch.float32)


class TracedLookup(torch.nn.Module):
    """Takes what the embedding takes, and records it as an operation."""

    def __init__(self, embedding: SparseEmbedding) -> None:
        super().__init__()
        self._is_bag = isinstance(embedding, SparseEmbeddingBag)
        self._has_last_offset = isinstance(embedding, SparseEmbeddingBag) and embedding.include_last_offset
        self._pooling = embedding.pooling
        self._table = embedding.name or "", embedding.dim, embedding.num_embeddings or 0, embedding.padding_idx

    def forward(
        self, ids: Any, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(ids, torch.Tensor) and offsets is None and not self._is_bag:
            rows: torch.Tensor = torch.ops.torchfleet.rows(ids, *self._table)
            return rows
        if isinstance(ids, torch.Tensor):
            if offsets is not None and self._has_last_offset:
                offsets = offsets[:-1]
            slots, is_single = [ids if offsets is None else (ids, offsets)], True
        else:
            is_single = isinstance(ids, tuple)
            slots = [ids] if is_single else list(ids)
        if not slots:
            raise ModelError(f"table '{self._table[0]}' is looked up without a slot")
        pairs = [(slot, None) if isinstance(slot, torch.Tensor) else tuple(slot) for slot in slots]
        pooled: torch.Tensor = torch.ops.torchfleet.pooled(
            [values for values, _ in pairs],
            [starts for _, starts in pairs],
            per_sample_weights,
            *self._table,
            self._pooling,
        )
        return pooled.squeeze(1) if is_single else pooled
