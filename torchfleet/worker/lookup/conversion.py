"""Conversion of torch's own sparse embeddings, and the embeddings of a model by table."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.errors import ModelError
from torchfleet.worker.lookup.embedding import SparseEmbedding, SparseEmbeddingBag
from torchfleet.worker.row_state.table_rows import TableRows


def convert(model: torch.nn.Module) -> torch.nn.Module:
    """Replace torch's sparse embeddings, in place; every SparseEmbedding gets its path, and a name if it has none.

    Returns the model.
    """
    if isinstance(model, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and model.sparse:
        raise ModelError("the model is itself a sparse embedding: put it into a module, so that it can be replaced")
    replaced: dict[int, SparseEmbedding] = {}  # by module: several may share one weight, each with its own padding
    tables: dict[int, str] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            if id(module) not in replaced:
                table = tables.setdefault(id(module.weight), path)
                replaced[id(module)] = _converted(module, path, table)
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, replaced[id(module)])
    shared: dict[str, TableRows] = {}
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding):
            module.path = path
            module.name = path if module.name is None else module.name
            module.table_rows = _shared_rows(module, shared)
    return model


def _shared_rows(module: SparseEmbedding, shared: dict[str, TableRows]) -> TableRows:
    """What all embeddings of a table have in common: that of the first. Of an earlier job only first values stay."""
    assert module.name is not None
    if module.is_copy:
        raise ModelError(
            f"'{module.path}' is in a copy of a distributed model, and its rows are the other's: distribute a new "
            "model and load the state_dict() of the other into it, or take fleet.to_plain(model)"
        )
    rows = shared.setdefault(module.name, module.table_rows)
    if rows is not module.table_rows:
        rows.take_over(module.table_rows)
    rows.is_distributed, rows.engine, rows.source = True, None, None
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


def _converted(module: torch.nn.Embedding | torch.nn.EmbeddingBag, path: str, table: str) -> SparseEmbedding:
    if module.weight.dtype != torch.float32:
        raise ModelError(f"'{path}' is {module.weight.dtype}: servers hold float32. Use model.float().")
    padding = module.padding_idx if isinstance(module, torch.nn.Embedding) else None  # bags leave it out
    if padding is not None and module.weight[padding].any():
        raise ModelError(
            f"'{path}': the row of padding_idx={padding} is not zero, and servers read it as zeros. Set it to zeros, "
            "or leave padding_idx out."
        )
    for field, neutral in (("max_norm", None), ("scale_grad_by_freq", False)):
        if getattr(module, field) != neutral:
            raise ModelError(
                f"'{path}': {field}={getattr(module, field)} is not supported on servers; leave it {neutral}"
            )
    kind = SparseEmbedding
    options: dict[str, Any] = {"name": table, "padding_idx": module.padding_idx}
    options["num_embeddings"] = module.num_embeddings
    if isinstance(module, torch.nn.EmbeddingBag):
        if module.mode not in ("sum", "mean") or module.include_last_offset:
            raise ModelError(f"'{path}': EmbeddingBag supports mode 'sum' and 'mean' without include_last_offset")
        kind, options["pooling"] = SparseEmbeddingBag, module.mode
    converted = kind(module.embedding_dim, **options)
    converted.weight.requires_grad_(module.weight.requires_grad)
    converted.is_converted = True
    if path == table:  # others of the same weight begin with the rows of the first
        converted.table_rows.first_values = module.weight.detach().to("cpu", torch.float32).numpy().copy()
    return converted
