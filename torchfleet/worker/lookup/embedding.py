"""SparseEmbedding: a layer whose rows live on the servers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torchfleet.errors import ModelError
from torchfleet.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.tables.settings.spec import Initializer
from torchfleet.worker.batch.bags import Bags, split_slots
from torchfleet.worker.lookup.embedding_settings import NO_BOUNDS, check_settings, checked_bounds, checked_policies
from torchfleet.worker.lookup.initializers import Uniform

Ids = Any  # a tensor, a slot (values, offsets), or a list of slots


class Lookups(Protocol):
    """Where a layer's rows come from: the engine of a worker, or the tables of a saved model."""

    def lookup(
        self, table: str, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None, create: bool
    ) -> torch.Tensor: ...

    def pooled(
        self,
        table: str,
        weight: torch.Tensor,
        slots: Sequence[torch.Tensor],
        bags: Bags,
        padding_idx: int | None,
        create: bool,
    ) -> torch.Tensor: ...


class SparseEmbedding(torch.nn.Module):
    """Rows of `dim` numbers for any 64-bit ids, held by the servers and created when an id is first seen.

    Called with ids of any shape it returns (*shape, dim). Called with `offsets` (as in torch.nn.EmbeddingBag: where
    each bag starts), or with a slot of a dataset's batch, it returns one row per bag, the `pooling` ("sum", "mean" or
    "max") of its ids' rows; called with a list of n slots, (samples, n, dim). Modules with the same `name` share one
    table. Ids equal to `padding_idx` read as zeros and learn nothing. With `num_embeddings` the ids are those from 0
    up to it, and the servers need no map to find their rows.

    `entry` says which ids get a row (fleet.CountFilterEntry and others, or a list of which all must admit), `shrink`
    which rows are dropped again (fleet.Shrink): docs/online.md.

    `weight_bounds=(low, high)`: after each update every number of the rows that it touched is at least `low` and at
    most `high`; first values are as `initializer` says. One of the two may be infinite. Not in geo training, where the
    servers add differences and make no updates: that is an error.

    `weight` is an empty (0, dim) parameter: it makes the embedding part of `model.parameters()`, so that a param
    group can give it a learning rate of its own. While the module is in eval mode, or under torch.no_grad(), ids
    without a row read as zeros and get none.
    """

    scale_grad_by_freq = False  # as in the torch embedding that it was made from

    def __init__(
        self,
        dim: int,
        name: str | None = None,
        entry: AdmissionEntry | Sequence[AdmissionEntry] | None = None,
        initializer: Initializer | None = None,
        padding_idx: int | None = None,
        pooling: str = "sum",
        seed: int = 0,
        num_embeddings: int | None = None,
        shrink: Shrink | None = None,
        weight_bounds: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        check_settings(dim, name, initializer, padding_idx, pooling, seed, num_embeddings)
        self.dim, self.name, self.padding_idx, self.pooling, self.seed = dim, name, padding_idx, pooling, seed
        self.initializer = initializer or Uniform(-0.05, 0.05)
        self.num_embeddings = num_embeddings
        self.entry, self.shrink = checked_policies(entry, shrink, num_embeddings)
        self.weight_bounds = checked_bounds(weight_bounds)
        self.first_values: np.ndarray[Any, Any] | None = None  # of a converted torch embedding
        self.weight = torch.nn.Parameter(torch.empty(0, dim))
        self.path = ""  # in its model, once it is part of a distributed one
        self._engine: Lookups | None = None

    def bind(self, engine: Lookups) -> None:
        self._engine = engine
        _keep_from_compilers()

    def forward(
        self, ids: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._engine is None or self.name is None:
            raise ModelError(
                f"SparseEmbedding '{self.name}' is not connected to servers: call fleet.distributed_model, "
                "fleet.distributed_optimizer and fleet.init_worker before the model."
            )
        create = self.training and torch.is_grad_enabled()
        if isinstance(ids, torch.Tensor) and offsets is None:
            self._check_weights(per_sample_weights, None)
            out = self._engine.lookup(self.name, self.weight, ids, self.padding_idx, create)
            return _scaled_by_freq(out, ids) if self.scale_grad_by_freq else out
        if offsets is not None:
            ids = (ids, offsets)
        is_single = isinstance(ids, tuple)  # (values, offsets); several slots are a list
        if not is_single and not isinstance(ids, list):
            raise ModelError(f"expected ids, a slot or a list of slots, found {type(ids).__name__}")
        self._check_weights(per_sample_weights, ids[0] if is_single else None)
        slots, bags = split_slots([ids] if is_single else list(ids), self.pooling)
        bags = bags._replace(weights=per_sample_weights, by_freq=self.scale_grad_by_freq)
        out = self._engine.pooled(self.name, self.weight, slots, bags, self.padding_idx, create)
        return out.squeeze(1) if is_single else out

    def _check_weights(self, weights: torch.Tensor | None, ids: torch.Tensor | None) -> None:
        """As in torch.nn.EmbeddingBag: one number per id of a bag, and sums only."""
        if weights is None:
            return
        if self.pooling != "sum":
            raise ModelError(f"'{self.path}': per_sample_weights go with sums, found pooling '{self.pooling}'")
        if ids is None or weights.shape != ids.shape or not weights.is_floating_point():
            found = f"{tuple(weights.shape)} {weights.dtype}"
            bags = "bags" if ids is None else f"ids of shape {tuple(ids.shape)}"
            raise ModelError(
                f"'{self.path}': expected a float for each id of {bags} as per_sample_weights, found {found}"
            )

    def extra_repr(self) -> str:
        size = "" if self.num_embeddings is None else f", num_embeddings={self.num_embeddings}"
        bounds = "" if self.weight_bounds == NO_BOUNDS else f", weight_bounds={self.weight_bounds}"
        return f"{self.dim}, name={self.name!r}{size}{bounds}"


class SparseEmbeddingBag(SparseEmbedding):
    """What torch.nn.EmbeddingBag(sparse=True) becomes: two-dimensional ids are bags of equal length."""

    include_last_offset = False  # as in the torch embedding that it was made from

    def forward(
        self, ids: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not isinstance(ids, torch.Tensor):
            return super().forward(ids, offsets, per_sample_weights)
        if ids.dim() == 2:
            if offsets is not None:
                raise ModelError(
                    "EmbeddingBag: offsets go with one-dimensional ids; two-dimensional ids are bags already"
                )
            offsets = torch.arange(0, ids.numel(), max(1, ids.size(1)))[: ids.size(0)]
        elif offsets is None:
            raise ModelError("EmbeddingBag: one-dimensional ids need offsets")
        elif self.include_last_offset:
            if not len(offsets) or int(offsets[-1]) != len(ids):
                raise ModelError(
                    f"'{self.path}': include_last_offset=True: the last offset must be the number of ids, {len(ids)}; "
                    f"found {offsets.tolist()[-1:]}"
                )
            offsets = offsets[:-1]
        return super().forward(ids, offsets, per_sample_weights)


@functools.cache
def _keep_from_compilers() -> None:
    """torch.compile compiles what stands before and behind a lookup. Called when one is bound: this imports the
    compiler, as torch's own optimizers do."""
    for kind in (SparseEmbedding, SparseEmbeddingBag):
        uncompiled = torch.compiler.disable(kind.forward)  # type: ignore[no-untyped-call]
        kind.forward = uncompiled  # type: ignore[method-assign]


def _scaled_by_freq(out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows, with gradients that are divided by how often their id appears."""
    if out.requires_grad:
        _, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        scale = counts[inverse].unsqueeze(-1).to(out)
        out.register_hook(lambda gradient: gradient / scale)  # type: ignore[no-untyped-call]
    return out
