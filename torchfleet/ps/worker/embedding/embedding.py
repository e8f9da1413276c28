"""SparseEmbedding: a layer whose rows live on the servers, or in a table on the device of its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torchfleet.base.errors import ModelError, WrongIds
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import Initializer
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.worker.batch.bags import Bags, split_slots
from torchfleet.ps.worker.embedding.compilation import keep_from_compilers
from torchfleet.ps.worker.embedding.embedding_arguments import Ids, check_weights, hashed_ids
from torchfleet.ps.worker.embedding.embedding_settings import (
    NO_BOUNDS,
    check_settings,
    checked_bounds,
    checked_cache,
    checked_device,
    checked_format,
    checked_kind,
    checked_optimizer,
    checked_policies,
    checked_storage,
)
from torchfleet.ps.worker.embedding.initializers import Uniform
from torchfleet.ps.worker.lookup import device_forward
from torchfleet.ps.worker.lookup.device_forward import Prepared
from torchfleet.ps.worker.lookup.device_lookups import DeviceLookups, RowsOnDevice
from torchfleet.ps.worker.lookup.thread_state import ThreadState
from torchfleet.ps.worker.lookup.transformed import not_plain, transforming
from torchfleet.ps.worker.row_state.embedding_state import EmbeddingState, read_by
from torchfleet.ps.worker.row_state.row_weight import RowWeight


class Lookups(Protocol):
    """Where a layer's rows come from: the engine of a worker, or the tables of a saved model."""

    @property
    def thread_state(self) -> ThreadState: ...

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
    each bag starts), or with a slot of a dataset's batch, it returns one row per bag, the `pooling` ("sum", "mean" or
    "max") of its ids' rows; called with a list of n slots, (samples, n, dim). Strings (an array of numpy or pyarrow, or
    a list) stand for the ids that fleet.hash_strings gives them. Modules with the same `name` share one table. Ids
    equal to `padding_idx` read as zeros and learn nothing. With `num_embeddings` the ids are 0 to num_embeddings - 1,
    and the servers need no map to find their rows.

    `entry` says which ids get a row (fleet.CountFilterEntry and others, or a list, all of which must admit the id),
    `shrink` which rows are dropped again (fleet.Shrink): docs/online.md.

    `weight_bounds=(low, high)`: after each update every number of the rows that it touched is at least `low` and at
    most `high`; first values are as `initializer` says. One of the two may be infinite. An error in geo training, where
    the servers add differences and make no updates.

    `state_dict()` has all rows as `weight`, of shape (num_embeddings, dim), and `load_state_dict` takes them. Without
    `num_embeddings` it is an error, unless `state` says "rows" (ids and rows, as `keys` and `weight`) or "none" (they
    are left out): docs/states.md.

    `optimizer` gives the table its own rule, such as fleet.optim.FTRL(lr=0.05, l1=1.0), made without parameters: it
    replaces the optimizer given to fleet.distributed_optimizer, learning rate included. A scheduler for its rate is
    made from it: docs/rows.md.

    `storage=fleet.Tiered(memory="8GB", path=DIR)`: each server keeps the rows used last in that much memory and the
    others in a file in that folder: docs/tiered.md.

    `dtype` ("float32", "bfloat16", "float16", "int8"): of the values on the servers and in saves; the rule computes in
    float32. int8 has a quantization step per row: `step="row"` computes it from the row's largest number, "learned"
    trains it (at `step_rate`). `wire`: the dtype in which values and gradients travel; left out, values travel as
    stored and gradients as float32: docs/rows.md.

    `cache="2GB"`: this much memory of the device on which the layer lies keeps the rows used last, which are trained
    there and written back to the servers before every save: docs/gpu_cache.md.

    `device="cuda"`: the rows are in a table in the memory of this process's GPU, in collective jobs ("cpu": the same on
    the CPU, to try it). `capacity`: rows to make room for at the start; the table grows beyond: docs/gpu.md.

    `kind` names a kind of table that was added to the registry (docs/architecture.md); left out, rows are in memory.

    `weight` is an empty (0, dim) parameter: it makes the embedding part of `model.parameters()`, so that a param
    group can give it a learning rate of its own. Its `grad` holds the gradients that wait for the step. Computing with
    it is an error while training; `batch_rows` gives the rows of a batch for terms of the loss. In eval mode, with
    `num_embeddings`, it is all rows, read-only (`users @ items.weight.T`): they are fetched as by `state_dict`, and
    kept until the next step, or call of `eval()` or `train()`. While the module is in eval mode, or under
    torch.no_grad(), ids without a row read as zeros and get none; a step then trains the rows that exist.
    """

    scale_grad_by_freq = False  # as in the torch embedding that it replaces

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
        kind: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        storage: TierStorage | None = None,
        dtype: str = "float32",
        step: str | None = None,
        step_rate: float | None = None,
        wire: str | None = None,
        cache: str | int | None = None,
        device: str | torch.device | None = None,
        capacity: int | None = None,
    ) -> None:
        super().__init__(padding_idx, state, num_embeddings)
        check_settings(dim, name, initializer, padding_idx, pooling, seed, num_embeddings)
        self.dim, self.name, self.padding_idx, self.pooling, self.seed = dim, name, padding_idx, pooling, seed
        self.initializer = initializer or Uniform(-0.05, 0.05)
        self.num_embeddings, self.kind = num_embeddings, checked_kind(kind, num_embeddings)
        self.entry, self.shrink = checked_policies(entry, shrink, num_embeddings)
        self.weight_bounds = checked_bounds(weight_bounds)
        self.optimizer = checked_optimizer(optimizer, name)
        self.storage = checked_storage(storage, num_embeddings)
        self.row_format = checked_format(dtype, step, step_rate, wire, self.weight_bounds)
        self.cache = checked_cache(cache)  # bytes; 0: none
        self.table_device, self.capacity = checked_device(device, capacity, self.storage, kind)
        self.weight: torch.nn.Parameter = RowWeight.empty(dim)
        self.is_converted = False  # it replaced a torch embedding
        self.path = ""  # in its model, once that is distributed

    @property
    def _engine(self) -> Lookups | DeviceLookups | None:
        engine: Lookups | DeviceLookups | None = self.table_rows.engine
        return engine

    def place(self, path: str) -> None:
        """Make the embedding part of a distributed model. A weight that torch.save turned into a plain parameter
        becomes a RowWeight again.
        """
        self.path = path
        if not isinstance(self.weight, RowWeight):
            self.weight = RowWeight.take_place_of(self.weight)
        self.row_weight.path, self.row_weight.table = path, self.name or ""
        read_by(self.row_weight, self)

    @property
    def row_weight(self) -> RowWeight:
        """`weight`, with its actual type."""
        assert isinstance(self.weight, RowWeight)
        return self.weight

    def bind(self, engine: Lookups | DeviceLookups) -> None:
        """Bind all embeddings of the table, copies included."""
        self.table_rows.engine = engine
        self.row_weight.pending = engine.thread_state
        if self.table_device is None:
            keep_from_compilers(SparseEmbedding)

    def batch_rows(self) -> torch.Tensor:
        """The distinct rows looked up for training since the model was called: (rows, dim), differentiable.

        For loss terms on rows: `loss + 1e-4 * embedding.batch_rows().square().sum()` is, in plain torch, the term on
        weight[ids.unique()]. Call it after the lookups. If parts of the model are called by themselves, the rows are
        those since the last step. Modules of one table share the rows: call one of them. Empty in eval mode and without
        gradients.
        """
        if self._engine is None or self.name is None:
            raise ModelError(_not_connected(self.name))
        rows = self._engine.thread_state.batch_rows(self.name, self.weight)
        if rows is None and self.training and torch.is_grad_enabled():
            raise ModelError(
                f"batch_rows() of table '{self.name}': no row was looked up for training since the last step. Call it "
                "after the embedding, before backward."
            )
        return self.weight.new_empty(0, self.dim) if rows is None else rows

    def forward(
        self, ids: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        engine: Any = self.table_rows.engine
        if engine is None or self.name is None:
            raise ModelError(_not_connected(self.name))
        if self.table_device is not None:
            return self._on_device(engine.rows[self.name], ids, offsets, per_sample_weights)
        if not isinstance(ids, torch.Tensor):
            ids = hashed_ids(self.name, self.num_embeddings, ids)
        if torch._C._get_tracing_state() is not None:
            raise ModelError(not_plain(self.path, "torch.jit.trace"))
        try:
            with torch._C.DisableTorchFunctionSubclass():  # the weight's device is read several times
                if offsets is None and per_sample_weights is None and isinstance(ids, torch.Tensor):
                    create = self.training and torch.is_grad_enabled()
                    out: torch.Tensor = engine.lookup(self.name, self.weight, ids, self.padding_idx, create)
                    return _scaled_by_freq(out, ids) if self.scale_grad_by_freq else out
                return self._looked_up(engine, self.name, ids, offsets, per_sample_weights)
        except (RuntimeError, WrongIds) as error:
            if what := transforming(ids):
                raise ModelError(not_plain(self.path, what)) from error
            raise

    def __prepare_scriptable__(self) -> Any:
        """Called by torch.jit.script."""
        raise ModelError(not_plain(self.path, "torch.jit.script"))

    def _looked_up(
        self,
        engine: Lookups,
        table: str,
        ids: Ids,
        offsets: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rows pooled over bags."""
        given, is_single = self._slots(table, ids, offsets, per_sample_weights)
        slots, bags = split_slots(given, self.pooling)
        bags = bags._replace(weights=per_sample_weights, by_freq=self.scale_grad_by_freq)
        create = self.training and torch.is_grad_enabled()
        out = engine.pooled(table, self.weight, slots, bags, self.padding_idx, create)
        return out.squeeze(1) if is_single else out

    def _slots(
        self, table: str, ids: Ids, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[list[Any], bool]:
        """(the slots that these arguments give, whether it is a single slot and not a list of slots)."""
        if isinstance(ids, torch.Tensor) and offsets is None:
            check_weights(self.path, self.pooling, weights, None)
        if offsets is not None:
            ids = (ids, offsets)
        is_single = isinstance(ids, tuple)  # (values, offsets); several slots are a list
        if not is_single and not isinstance(ids, list):
            raise WrongIds(
                f"table '{table}' expects ids in a tensor, strings, a slot of a batch or a list of slots, found "
                f"{type(ids).__name__}: use torch.as_tensor(ids)"
            )
        check_weights(self.path, self.pooling, weights, ids[0] if is_single else None)
        return [ids] if is_single else ids, is_single

    def _on_device(
        self, rows: RowsOnDevice, ids: Ids, offsets: torch.Tensor | None, per_sample_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """`_looked_up`, in a table on this process's device."""
        prepared = self.prepared(ids, offsets, per_sample_weights)
        return prepared.finish(rows.lookup(prepared.ids, self.padding_idx, *self.device_modes(rows)))

    def device_modes(self, rows: RowsOnDevice) -> tuple[bool, bool]:
        """(whether missing ids get rows, whether the rows are trained) in a lookup now."""
        if not torch.compiler.is_compiling():
            rows.trains = self.weight.requires_grad
        return self.training and torch.is_grad_enabled(), rows.trains

    def prepared(
        self, ids: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> Prepared:
        """What a call with these arguments looks up in a table on a device, and how its output is made of the rows."""
        assert self.name is not None
        if not isinstance(ids, torch.Tensor):
            ids = hashed_ids(self.name, self.num_embeddings, ids)
        if isinstance(ids, torch.Tensor) and offsets is None and per_sample_weights is None:
            return device_forward.as_they_are(ids)
        slots, is_single = self._slots(self.name, ids, offsets, per_sample_weights)
        found = device_forward.pooled(self.name, slots, self.pooling, per_sample_weights, self.padding_idx)
        return Prepared(found.ids, lambda values: found.finish(values).squeeze(1)) if is_single else found

    def extra_repr(self) -> str:
        size = "" if self.num_embeddings is None else f", num_embeddings={self.num_embeddings}"
        bounds = "" if self.weight_bounds == NO_BOUNDS else f", weight_bounds={self.weight_bounds}"
        dtype = f", dtype={self.row_format.dtype!r}" if self.row_format.is_narrow else ""
        device = "" if self.table_device is None else f", device={self.table_device!r}"
        return f"{self.dim}, name={self.name!r}{size}{bounds}{dtype}{device}"


def _not_connected(name: str | None) -> str:
    return (
        f"SparseEmbedding '{name}' is not connected to servers: call fleet.distributed_model, "
        "fleet.distributed_optimizer and fleet.init_worker before the model."
    )


def _scaled_by_freq(out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows, with gradients divided by the number of times their id appears."""
    if out.requires_grad:
        _, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        scale = counts[inverse].unsqueeze(-1).to(out)
        out.register_hook(lambda gradient: gradient / scale)  # type: ignore[no-untyped-call]
    return out
