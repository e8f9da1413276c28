"""Conversion of torch's own sparse embeddings, and the embeddings of a model by table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchfleet.errors import ModelError
from torchfleet.worker.lookup.embedding import SparseEmbedding, SparseEmbeddingBag
from torchfleet.worker.row_state.table_rows import TableRows
from torchfleet.worker.weights.row_weight import RowWeight
from torchfleet.worker.weights.tied_weights import tied_elsewhere, told


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def convert(model: torch.nn.Module, tell: Callable[[str], None] = _say) -> torch.nn.Module:
    """Replace torch's sparse embeddings, in place; every SparseEmbedding gets its path, and a name if it has none.

    One whose weight another module computes with stays a dense layer, and `tell` is called with a line that says so.
    Whoever else holds the weight of one that is replaced (an optimizer, a list) holds its RowWeight from then on.
    Returns the model.
    """
    if _is_sparse(model):
        raise ModelError("the model is itself a sparse embedding: put it into a module, so that it can be replaced")
    replaced: dict[int, SparseEmbedding] = {}  # by module: several may share one weight, each with its own padding
    tables: dict[int, tuple[str, np.ndarray[Any, Any]]] = {}  # by weight: its table and first values
    tied = tied_elsewhere(model, _is_sparse)
    if tied:
        tell(told(tied))
    for path in tied:
        model.get_submodule(path).sparse = False  # type: ignore[assignment]  # the other layer's gradient is dense
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and _is_sparse(module):
            if id(module) not in replaced:
                if id(module.weight) not in tables:
                    tables[id(module.weight)] = path, _first_values(module, path)
                replaced[id(module)] = _converted(module, path, *tables[id(module.weight)])
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, replaced[id(module)])
    shared: dict[str, TableRows] = {}
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding):
            module.name = path if module.name is None else module.name
            module.table_rows = _shared_rows(module, shared)
    for path, module in reversed(list(model.named_modules())):  # a weight has the path of its first module
        if isinstance(module, SparseEmbedding):
            module.place(path)
    return model


def _is_sparse(module: torch.nn.Module) -> bool:
    """Whether it is an embedding of torch's whose rows are to be on the servers."""
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse


def _shared_rows(module: SparseEmbedding, shared: dict[str, TableRows]) -> TableRows:
    """What all embeddings of a table have in common: that of the first."""
    assert module.name is not None
    rows = shared.setdefault(module.name, module.table_rows)
    if rows is not module.table_rows:
        rows.take_over(module.table_rows)
    rows.is_distributed = True
    return rows


def sparse_embeddings(model: torch.nn.Module) -> dict[str, list[SparseEmbedding]]:
    """The model's embeddings by table; those that share a table must agree on it."""
    found: dict[str, list[SparseEmbedding]] = {}
    for module in model.modules():
        if isinstance(module, SparseEmbedding):
            assert module.name is not None
            found.setdefault(module.name, []).append(module)
    for name, modules in found.items():
        for field in ("dim", "initializer", "seed", "num_embeddings", "entry", "shrink", "weight_bounds"):
            values = {getattr(module, field) for module in modules}
            if len(values) > 1:
                raise ModelError(
                    f"table '{name}' is shared by embeddings with different {field}: {values}. Make them equal."
                )
    return found


def _first_values(module: torch.nn.Embedding | torch.nn.EmbeddingBag, path: str) -> np.ndarray[Any, Any]:
    """A copy of the rows that torch made."""
    if type(module.weight) is not torch.nn.Parameter:
        raise ModelError(
            f"'{path}.weight' is a {type(module.weight).__name__}, and rows on servers stand for a plain "
            "torch.nn.Parameter. Remove its parametrization, or leave it dense: sparse=False."
        )
    if module.weight.dtype != torch.float32:
        raise ModelError(f"'{path}' is {module.weight.dtype}: servers hold float32. Use model.float().")
    values: np.ndarray[Any, Any] = module.weight.detach().cpu().numpy().copy()
    return values


def _converted(
    module: torch.nn.Embedding | torch.nn.EmbeddingBag, path: str, table: str, first: np.ndarray[Any, Any]
) -> SparseEmbedding:
    padding = module.padding_idx if isinstance(module, torch.nn.Embedding) else None  # bags leave it out
    if padding is not None and first[padding].any():
        raise ModelError(
            f"'{path}': the row of padding_idx={padding} is not zero, and servers read it as zeros. Set it to zeros, "
            "or leave padding_idx out."
        )
    if module.max_norm is not None:
        raise ModelError(
            f"'{path}': max_norm={module.max_norm} changes rows whenever they are read, and servers change them only "
            "by updates. Leave it None; bound what updates make of a row, with fleet.nn.SparseEmbedding("
            "weight_bounds=...), or add a penalty to the loss."
        )
    kind = SparseEmbedding
    options: dict[str, Any] = {"name": table, "padding_idx": module.padding_idx}
    options["num_embeddings"] = module.num_embeddings
    if isinstance(module, torch.nn.EmbeddingBag):
        if module.mode == "max" and module.scale_grad_by_freq:
            raise ModelError(f"'{path}': scale_grad_by_freq=True goes with mode 'sum' and 'mean', as in torch")
        kind, options["pooling"] = SparseEmbeddingBag, module.mode
    converted = kind(module.embedding_dim, **options)
    converted.scale_grad_by_freq = module.scale_grad_by_freq
    if isinstance(converted, SparseEmbeddingBag) and isinstance(module, torch.nn.EmbeddingBag):
        converted.include_last_offset = module.include_last_offset
    weight: Any = module.weight
    converted.weight = weight if isinstance(weight, RowWeight) else RowWeight.take_place_of(weight)
    converted.is_converted = True
    if path == table:  # others of the same weight begin with the rows of the first
        converted.table_rows.first_values = first
    return converted
