"""Embeddings whose rows live on the servers, and the conversion of torch's own sparse embeddings into them.

Layers of collective training have their names here too: ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
(docs/collective/tensor_parallel.md) and MarginSoftmax (docs/collective/classification.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torchfleet.errors import ModelError, TableError
from torchfleet.tables.entry import Entry, Shrink, combined
from torchfleet.tables.spec import Initializer

if TYPE_CHECKING:
    from torchfleet.collective.margin_softmax import MarginSoftmax as MarginSoftmax  # noqa: PLC0414
    from torchfleet.collective.tensor_parallel import ColumnParallelLinear as ColumnParallelLinear  # noqa: PLC0414
    from torchfleet.collective.tensor_parallel import RowParallelLinear as RowParallelLinear  # noqa: PLC0414
    from torchfleet.collective.tensor_parallel import VocabParallelEmbedding as VocabParallelEmbedding  # noqa: PLC0414
    from torchfleet.ps.engine import Engine

_COLLECTIVE = {
    "ColumnParallelLinear": "tensor_parallel",
    "RowParallelLinear": "tensor_parallel",
    "VocabParallelEmbedding": "tensor_parallel",
    "MarginSoftmax": "margin_softmax",
}

Ids = Any  # a tensor, a slot (values, offsets), or a list of slots


class Bags(NamedTuple):
    """Which ids are put together: bag b holds those from offsets[b] to offsets[b + 1], all bags of a slot together."""

    offsets: np.ndarray[Any, Any]
    num_slots: int
    mean: bool


def Constant(value: float) -> Initializer:
    """Every number of a new row is `value`."""
    return Initializer("constant", float(value))


def Uniform(low: float, high: float) -> Initializer:
    """Numbers evenly spread between `low` and `high`."""
    return Initializer("uniform", float(low), float(high))


def Normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normally distributed numbers."""
    return Initializer("normal", float(mean), float(std))


def TruncatedNormal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normally distributed numbers within two standard deviations."""
    return Initializer("truncated_normal", float(mean), float(std))


class SparseEmbedding(torch.nn.Module):
    """Rows of `dim` numbers for any 64-bit ids, held by the servers and created when an id is first seen.

    Called with ids of any shape it returns (*shape, dim). Called with `offsets` (as in torch.nn.EmbeddingBag: where
    each bag starts), or with a slot of a dataset's batch, it returns one row per bag, the `pooling` ("sum" or "mean")
    of its ids' rows; called with a list of n slots, (samples, n, dim). Modules with the same `name` share one table.
    Ids equal to `padding_idx` read as zeros and learn nothing. With `num_embeddings` the ids are those from 0 up to it,
    and the servers need no map to find their rows.

    `entry` says which ids get a row (fleet.CountFilterEntry and others, or a list of which all must admit), `shrink`
    which rows are dropped again (fleet.Shrink): docs/online.md.

    `weight` is an empty (0, dim) parameter: it makes the embedding part of `model.parameters()`, so that a param
    group can give it a learning rate of its own. While the module is in eval mode, or under torch.no_grad(), ids
    without a row read as zeros and get none.
    """

    def __init__(
        self,
        dim: int,
        name: str | None = None,
        entry: Entry | Sequence[Entry] | None = None,
        initializer: Initializer | None = None,
        padding_idx: int | None = None,
        pooling: str = "sum",
        seed: int = 0,
        num_embeddings: int | None = None,
        shrink: Shrink | None = None,
    ) -> None:
        super().__init__()
        if pooling not in ("sum", "mean"):
            raise ModelError(f"SparseEmbedding: pooling must be 'sum' or 'mean', found {pooling!r}")
        if dim < 1:
            raise ModelError(f"SparseEmbedding: dim must be at least 1, found {dim}")
        if num_embeddings is not None and num_embeddings < 1:
            raise ModelError(f"SparseEmbedding: num_embeddings must be at least 1, found {num_embeddings}")
        self.dim, self.name, self.padding_idx, self.pooling, self.seed = dim, name, padding_idx, pooling, seed
        self.initializer = initializer or Uniform(-0.05, 0.05)
        self.num_embeddings = num_embeddings
        self.entry, self.shrink = _policies(entry, shrink, num_embeddings)
        self.first_values: np.ndarray[Any, Any] | None = None  # of a converted torch embedding
        self.weight = torch.nn.Parameter(torch.empty(0, dim))
        self._engine: Engine | None = None

    def bind(self, engine: Engine) -> None:
        self._engine = engine

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
        is_one = isinstance(ids, tuple)  # (values, offsets); several slots are a list
        if not is_one and not isinstance(ids, list):
            raise ModelError(f"expected ids, a slot or a list of slots, found {type(ids).__name__}")
        tensors, bags = _joined([ids] if is_one else list(ids), self.pooling == "mean")
        out = self._engine.pooled(self.name, self.weight, tensors, bags, self.padding_idx, create)
        return out.squeeze(1) if is_one else out

    def extra_repr(self) -> str:
        size = "" if self.num_embeddings is None else f", num_embeddings={self.num_embeddings}"
        return f"{self.dim}, name={self.name!r}{size}"


def _policies(
    entry: Entry | Sequence[Entry] | None, shrink: Shrink | None, num_embeddings: int | None
) -> tuple[Entry, Shrink]:
    if shrink is not None and not isinstance(shrink, Shrink):
        raise ModelError(f"SparseEmbedding(shrink=...): expected fleet.Shrink(...), found {shrink!r}")
    try:
        policies = combined(entry), shrink or Shrink()
    except TableError as error:
        raise ModelError(f"SparseEmbedding: {error}") from None
    if num_embeddings is not None and policies != (Entry(), Shrink()):
        raise ModelError("SparseEmbedding: entry and shrink are for ids without end; leave num_embeddings out")
    return policies


def _joined(slots: list[Any], mean: bool) -> tuple[list[torch.Tensor], Bags]:
    """(ids of each slot, the bags that they make, one after another)."""
    first = slots[0] if slots else None
    if isinstance(first, torch.Tensor) and first.dim() == 2 and all(_is_like(slot, first) for slot in slots):
        total, width = len(slots) * first.numel(), max(1, first.size(1))
        if total:
            return slots, Bags(np.arange(0, total + 1, width), len(slots), mean)
    pairs = [_bags(slot) for slot in slots]
    sizes = [len(starts) for _, starts in pairs]
    if not sizes or len(set(sizes)) > 1:
        raise ModelError(f"expected slots of one batch, found slots with {sizes} samples")
    ends = np.cumsum([0, *(ids.numel() for ids, _ in pairs)])
    starts = [starts + before for (_, starts), before in zip(pairs, ends[:-1], strict=True)]
    return [ids for ids, _ in pairs], Bags(np.concatenate([*starts, ends[-1:]]), len(pairs), mean)


def _is_like(slot: Any, first: torch.Tensor) -> bool:
    return isinstance(slot, torch.Tensor) and slot.shape == first.shape


def _bags(slot: Any) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """(ids, where each sample's begin) of a slot: values and offsets, or a block with a row per sample."""
    if isinstance(slot, torch.Tensor):
        if slot.dim() not in (1, 2):
            raise ModelError(f"a slot has one row of ids per sample, found a tensor of shape {tuple(slot.shape)}")
        return slot, np.arange(len(slot), dtype=np.int64) * (slot.size(1) if slot.dim() == 2 else 1)
    pair = tuple(slot) if isinstance(slot, tuple) else ()
    if len(pair) != 2 or not all(isinstance(part, torch.Tensor) for part in pair):
        raise ModelError(
            "expected a slot of a batch: ids with a row per sample, or values and offsets; found "
            f"{type(slot).__name__}. Give batch['name'], or a list of such slots."
        )
    ids, offsets = pair
    starts: np.ndarray[Any, Any] = offsets.detach().cpu().numpy().astype(np.int64)
    bounds = np.append(starts, ids.numel())
    if (np.diff(bounds) < 0).any() or bounds[0] != 0:
        raise ModelError(
            f"offsets must start at 0 and never fall, up to {ids.numel()} ids; found {offsets.tolist()[:8]}..."
        )
    return ids, starts


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


def convert(model: torch.nn.Module) -> torch.nn.Module:
    """Replace torch's sparse embeddings, in place, and give every SparseEmbedding a name. Returns the model."""
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
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding) and module.name is None:
            module.name = path
    return model


def sparse_embeddings(model: torch.nn.Module) -> dict[str, list[SparseEmbedding]]:
    """The model's embeddings by table; those that share a table must agree on it."""
    found: dict[str, list[SparseEmbedding]] = {}
    for module in model.modules():
        if isinstance(module, SparseEmbedding):
            assert module.name is not None
            found.setdefault(module.name, []).append(module)
    for name, modules in found.items():
        for field in ("dim", "initializer", "seed", "num_embeddings", "entry", "shrink"):
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
    converted.first_values = module.weight.detach().to(torch.float32).numpy().copy()
    return converted


def __getattr__(name: str) -> Any:
    """Layers of collective training are imported when they are used: jobs with servers start faster without."""
    if name not in _COLLECTIVE:
        raise AttributeError(f"torchfleet.nn has no '{name}'")
    return getattr(import_module(f"torchfleet.collective.{_COLLECTIVE[name]}"), name)
