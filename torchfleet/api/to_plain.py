"""Converts a distributed module to a plain one: rows become ordinary parameters, without connections to servers."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.api import process_role
from torchfleet.api.model_copy import copied
from torchfleet.api.plain_layers import KeyedEmbedding, SizedEmbedding
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.embedding.conversion import sparse_embeddings
from torchfleet.ps.worker.embedding.converted import as_torch
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_bag import SparseEmbeddingBag
from torchfleet.ps.worker.row_state.table_rows import without_rows
from torchfleet.ps.worker.row_state.whole_rows import WholeRows


def to_plain(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model in plain torch, with the current values. It needs no servers, trains and exports like any
    module.

    A former torch.nn.Embedding or EmbeddingBag, or a subclass of it, becomes one again, with dense gradients. A
    SparseEmbedding with a declared size becomes a layer with all of its rows. One without a size becomes a layer over
    the ids that have a row; its `ids` gives the index of each. Ids without a row read as zeros, as in prediction.
    Shared tables stay shared. Any worker may call it. It pulls the rows in slices. If a table does not fit into memory,
    it raises an error before it pulls it.
    """
    if process_role.is_collective():
        raise FleetError("fleet.to_plain is for models with rows on servers; a collective model has its own in .module")
    with without_rows():
        model.state_dict()  # refreshes the dense values
    memo: dict[int, Any] = {}  # replacements of the model's objects in the copy
    for modules in sparse_embeddings(model).values():
        first = modules[0]
        rows = _without_empty(first.table_rows.whole(first._spec, as_read=True))
        weight = torch.nn.Parameter(rows.values.to(first.weight.device), first.weight.requires_grad)
        for module in modules:
            memo[id(module)] = _layer(module, rows, weight, memo).train(module.training)
            memo[id(module.weight)] = weight
    return copied(model, memo)


def _without_empty(rows: WholeRows) -> WholeRows:
    """Add a row to an empty table: the search needs at least one id."""
    if rows.keys is None or len(rows.keys):
        return rows
    return WholeRows(torch.zeros(1, dtype=torch.int64), torch.zeros(1, rows.values.shape[1]))


def _layer(
    module: SparseEmbedding, rows: WholeRows, weight: torch.nn.Parameter, memo: dict[int, Any]
) -> torch.nn.Module:
    num, dim = weight.shape
    made: torch.nn.Module
    if rows.keys is not None:
        made = KeyedEmbedding(rows.keys.to(weight.device), weight, module.padding_idx, module.pooling)
    elif module.is_converted:
        made = as_torch(module, weight, memo)
    elif isinstance(module, SparseEmbeddingBag):
        made = torch.nn.EmbeddingBag(
            *(num, dim),
            mode=module.pooling,
            padding_idx=module.padding_idx,
            scale_grad_by_freq=module.scale_grad_by_freq,
            include_last_offset=module.include_last_offset,
            _weight=weight,
        )
        made.weight = weight
    else:
        made = SizedEmbedding(weight, module.padding_idx, module.pooling)
    return made
