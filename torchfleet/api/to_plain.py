"""A plain module from a distributed one: rows in ordinary parameters, and nothing that leads to servers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchfleet.api import process_role
from torchfleet.api.plain_layers import KeyedEmbedding, SizedEmbedding
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.lookup.conversion import sparse_embeddings
from torchfleet.ps.worker.lookup.embedding import SparseEmbedding, SparseEmbeddingBag
from torchfleet.ps.worker.row_state.table_rows import without_rows
from torchfleet.ps.worker.row_state.whole_rows import WholeRows

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def to_plain(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model in plain torch, with today's values: it needs no servers, trains and exports as any module.

    What was torch.nn.Embedding or EmbeddingBag is that again, with dense gradients. A SparseEmbedding with a declared
    size becomes a layer with all of its rows; one without, a layer over the ids that have a row, in whose `ids` the
    index of each is found. Ids without a row read as zeros, as in a prediction. Tables that were shared are shared.
    Rows come in slices to this process, any worker's; a table that does not fit its memory is an error before that.
    """
    if process_role.is_collective():
        raise FleetError("fleet.to_plain is for models with rows on servers; a collective model has its own in .module")
    with without_rows():
        model.state_dict()  # brings the dense values up to date
    memo: dict[int, Any] = {}  # what the copy has in the place of what the model has
    for modules in sparse_embeddings(model).values():
        first = modules[0]
        rows = _without_empty(first.table_rows.whole(first._spec, as_read=True))
        weight = torch.nn.Parameter(rows.values.to(first.weight.device), first.weight.requires_grad)
        for module in modules:
            memo[id(module)] = _layer(module, rows, weight).train(module.training)
            memo[id(module.weight)] = weight
    plain: torch.nn.Module = copy.deepcopy(model, memo)
    for part in plain.modules():
        _drop_hooks(part)
    return plain


def _without_empty(rows: WholeRows) -> WholeRows:
    """A search needs an id to look at."""
    if rows.keys is None or len(rows.keys):
        return rows
    return WholeRows(torch.zeros(1, dtype=torch.int64), torch.zeros(1, rows.values.shape[1]))


def _layer(module: SparseEmbedding, rows: WholeRows, weight: torch.nn.Parameter) -> torch.nn.Module:
    num, dim = weight.shape
    made: torch.nn.Module
    if rows.keys is not None:
        made = KeyedEmbedding(rows.keys.to(weight.device), weight, module.padding_idx, module.pooling)
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
    elif module.is_converted:
        by_freq = module.scale_grad_by_freq
        made = torch.nn.Embedding(num, dim, module.padding_idx, scale_grad_by_freq=by_freq, _weight=weight)
        made.weight = weight
    else:
        made = SizedEmbedding(weight, module.padding_idx, module.pooling)
    return made


def _drop_hooks(module: torch.nn.Module) -> None:
    """Those of torchfleet, which the copy has from the model."""
    for hooks in (getattr(module, name) for name in _HOOKS):
        for number, hook in list(hooks.items()):
            function = getattr(hook, "hook", hook)  # torch wraps some
            if getattr(function, "__module__", "").startswith("torchfleet."):
                del hooks[number]
                for marks in (getattr(module, name) for name in _MARKS):
                    marks.pop(number, None)
