"""SparseEmbedding: a layer whose rows live on the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torchfleet.errors import ModelError
from torchfleet.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.tables.settings.spec import Initializer
from torchfleet.worker.lookup.bags import Bags, split_slots
from torchfleet.worker.lookup.embedding_settings import NO_BOUNDS, check_settings, checked_bounds, checked_policies
from torchfleet.worker.lookup.initializers import Uniform
from torchfleet.worker.row_state.embedding_state import EmbeddingState

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


class SparseEmbedding(EmbeddingState):
    """Rows of `dim` numbers for any 64-bit ids, held by the servers and created when an id is first seen.

    Called with ids of any shape it returns (*shape, dim). Called with `offsets` (as in torch.nn.EmbeddingBag: where
    each bag starts), or with a slot of a dataset's batch, it returns one row per bag, the `pooling` ("sum" or "mean")
    of its ids' rows; called with a list of n slots, (samples, n, dim). Modules with the same `name` share one table.
    Ids equal to `padding_idx` read as zeros and learn nothing. With `num_embeddings` the ids are those from 0 up to it,
    and the servers need no map to find their rows.

    `entry` says which ids get a row (fleet.CountFilterEntry and others, or a list of which all must admit), `shrink`
    which rows are dropped again (fleet.Shrink): docs/online.md.

    `weight_bounds=(low, high)`: after each update every number of the rows that it touched is at least `low` and at
    most `high`; first values are as `initializer` says. One of the two may be infinite. Not in geo training, where the
    servers add differences and make no updates: that is an error.

    `state_dict()` has all rows as `weight`, of shape (num_embeddings, dim), and `load_state_dict` takes them. Without
    `num_embeddings` it is an error, unless `state` says "rows" (ids and rows, as `keys` and `weight`) or "none" (they
    are left out): docs/states.md.

    `weight` is an empty (0, dim) parameter: it makes the embedding part of `model.parameters()`, so that a param
    group can give it a learning rate of its own. While the module is in eval mode, or under torch.no_grad(), ids
    without a row read as zeros and get none.
    """

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
        state: str | None = None,
    ) -> None:
        super().__init__(padding_idx, state, num_embeddings)
        check_settings(dim, name, initializer, padding_idx, pooling, seed, num_embeddings)
        self.dim, self.name, self.padding_idx, self.pooling, self.seed = dim, name, padding_idx, pooling, seed
        self.initializer = initializer or Uniform(-0.05, 0.05)
        self.num_embeddings = num_embeddings
        self.entry, self.shrink = checked_policies(entry, shrink, num_embeddings)
        self.weight_bounds = checked_bounds(weight_bounds)
        self.weight = torch.nn.Parameter(torch.empty(0, dim))
        self.is_converted = False  # it was an embedding of torch's
        self.path = ""  # in its model, once it is part of a distributed one

    @property
    def _engine(self) -> Lookups | None:
        engine: Lookups | None = self.table_rows.engine
        return engine

    def bind(self, engine: Lookups) -> None:
        """For all embeddings of the table, copies included."""
        self.table_rows.engine = engine

    def forward(self, ids: Ids, offsets: torch.Tensor | None = None) -> torch.Tensor:
        if self._engine is None or self.name is None:
            raise ModelError(
                f"SparseEmbedding '{self.name}' is not connected to servers: call fleet.distributed_model, "
                "fleet.distributed_optimizer and fleet.init_worker before the model."
            )
        create = self.training and torch.is_grad_enabled()
        if isinstance(ids, torch.Tensor) and offsets is None:
            return self._engine.lookup(self.name, self.weight, ids, self.padding_idx, create)
        if offsets is not None:
            ids = (ids, offsets)
        is_single = isinstance(ids, tuple)  # (values, offsets); several slots are a list
        if not is_single and not isinstance(ids, list):
            raise ModelError(f"expected ids, a slot or a list of slots, found {type(ids).__name__}")
        slots, bags = split_slots([ids] if is_single else list(ids), self.pooling == "mean")
        out = self._engine.pooled(self.name, self.weight, slots, bags, self.padding_idx, create)
        return out.squeeze(1) if is_single else out

    def extra_repr(self) -> str:
        size = "" if self.num_embeddings is None else f", num_embeddings={self.num_embeddings}"
        bounds = "" if self.weight_bounds == NO_BOUNDS else f", weight_bounds={self.weight_bounds}"
        return f"{self.dim}, name={self.name!r}{size}{bounds}"


class SparseEmbeddingBag(SparseEmbedding):
    """What torch.nn.EmbeddingBag(sparse=True) becomes: two-dimensional ids are bags of equal length."""

    def forward(self, ids: Ids, offsets: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(ids, torch.Tensor):
            return super().forward(ids, offsets)
        if ids.dim() == 2:
            if offsets is not None:
                raise ModelError(
                    "EmbeddingBag: offsets go with one-dimensional ids; two-dimensional ids are bags already"
                )
            offsets = torch.arange(0, ids.numel(), max(1, ids.size(1)))[: ids.size(0)]
        elif offsets is None:
            raise ModelError("EmbeddingBag: one-dimensional ids need offsets")
        return super().forward(ids, offsets)
