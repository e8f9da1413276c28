"""SparseEmbeddingCollection: several embeddings that one call looks up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_arguments import Ids
from torchfleet.ps.worker.lookup.device_forward import Prepared
from torchfleet.ps.worker.lookup.device_lookups import DeviceLookups
from torchfleet.ps.worker.lookup.joined_tables import Asked, JoinedRows


class SparseEmbeddingCollection(torch.nn.ModuleDict):
    """Embeddings by name, looked up by one call: `collection({"user": ids, "item": ids})` is
    `{"user": collection["user"](ids), "item": collection["item"](ids)}`, bit for bit. Each name has what its embedding
    takes as `ids`: a tensor, strings, a slot (values, offsets), or a list of slots. Names may be left out.

    For embeddings with tables in GPU memory that have the same dim, first values and rule, one launch of each kernel
    finds, creates and gathers the rows of all of them: docs/gpu.md. Embeddings on servers are called one after the
    other; one message asks for the rows of all of them. torch's own embeddings, which
    fleet.distributed_model(model, sparse=...) converts, may be members, too.
    """

    def forward(self, ids: Mapping[str, Ids]) -> dict[str, torch.Tensor]:
        """The output of each embedding that has ids, in the order of `ids`."""
        unknown = [name for name in ids if name not in self]
        if unknown:
            raise ModelError(
                f"SparseEmbeddingCollection: expected ids for some of {sorted(self)}, found ids for {sorted(unknown)}"
            )
        if torch.compiler.is_compiling():  # a lookup is an operator of its own there
            return {name: self[name](given) for name, given in ids.items()}
        found: dict[str, torch.Tensor] = {}
        by_group: dict[JoinedRows, list[tuple[str, Asked, Prepared]]] = {}
        for name, given in ids.items():
            group = _group_of(self[name])
            if group is None:
                found[name] = self[name](given)
            else:
                by_group.setdefault(group, []).append((name, *_asked(self[name], given)))
        for group, calls in by_group.items():
            values = group.lookup([asked for _, asked, _ in calls])
            for (name, _, prepared), own in zip(calls, values, strict=True):
                found[name] = prepared.finish(own)
        return {name: found[name] for name in ids}


def _group_of(module: torch.nn.Module) -> JoinedRows | None:
    """The group of the module's table; None if the module must be called by itself: it has no group, or has hooks."""
    if not isinstance(module, SparseEmbedding) or module._forward_hooks or module._forward_pre_hooks:
        return None
    engine: Any = module.table_rows.engine
    group = engine.group_of.get(module.name or "") if isinstance(engine, DeviceLookups) else None
    return group if isinstance(group, JoinedRows) else None


def _asked(module: torch.nn.Module, ids: Ids) -> tuple[Asked, Prepared]:
    """The lookup of a call of this embedding, whose table is in a group."""
    assert isinstance(module, SparseEmbedding)
    engine: Any = module.table_rows.engine
    rows, prepared = engine.rows[module.name], module.prepared(ids)
    return Asked(rows, prepared.ids, module.padding_idx, *module.device_modes(rows)), prepared
