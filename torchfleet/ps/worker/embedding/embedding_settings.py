"""Checks of a SparseEmbedding's settings at construction: a wrong one raises a ModelError that names it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchfleet.base.errors import FleetError, ModelError, TableError
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink, combined
from torchfleet.ps.tables.settings.row_format import DTYPES, STEP_RATE, STEPS, RowFormat
from torchfleet.ps.tables.settings.spec import KINDS, MAX_DIM, MAX_SIZE, Initializer
from torchfleet.ps.tables.settings.storage import IN_MEMORY, TierStorage
from torchfleet.ps.tables.settings.table_size import parse_bytes
from torchfleet.ps.worker.lookup.optimizer_rules import rule_of
from torchfleet.ps.worker.optim.without_parameters import lacks_parameters

Bounds = tuple[float, float]
NO_BOUNDS: Bounds = (-math.inf, math.inf)

_ID_LIMIT = 1 << 64  # ids are 64-bit, signed or unsigned


def check_settings(
    dim: Any, name: Any, initializer: Any, padding_idx: Any, pooling: Any, seed: Any, num_embeddings: Any
) -> None:
    """Raise ModelError for the first setting with a wrong type or out of range."""
    check_whole_number("dim", dim, 1, MAX_DIM)
    check_whole_number("seed", seed, 0, (1 << 63) - 1)
    if num_embeddings is not None:
        check_whole_number("num_embeddings", num_embeddings, 1, MAX_SIZE)
    if padding_idx is not None:
        check_whole_number("padding_idx", padding_idx, -_ID_LIMIT // 2, _ID_LIMIT - 1)
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= 200):
        raise ModelError(f"SparseEmbedding(name=...): expected a text of 1 to 200 characters, found {name!r}")
    if pooling not in ("sum", "mean", "max"):
        raise ModelError(f"SparseEmbedding: pooling must be 'sum', 'mean' or 'max', found {pooling!r}")
    if initializer is not None and not isinstance(initializer, Initializer):
        raise ModelError(
            "SparseEmbedding(initializer=...): expected fleet.nn.Uniform, Normal, TruncatedNormal or Constant, found "
            f"{initializer!r}"
        )


def check_whole_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ModelError(f"SparseEmbedding({name}=...): expected a whole number, found {value!r}")
    if not least <= value:
        raise ModelError(f"SparseEmbedding: {name} must be at least {least}, found {value}")
    if value > most:
        raise ModelError(f"SparseEmbedding: {name} must be at most {most}, found {value}")


def checked_policies(
    entry: AdmissionEntry | Sequence[AdmissionEntry] | None, shrink: Shrink | None, num_embeddings: int | None
) -> tuple[AdmissionEntry, Shrink]:
    """The admission and eviction policies: all entries combined, and defaults for those not given."""
    if shrink is not None and not isinstance(shrink, Shrink):
        raise ModelError(f"SparseEmbedding(shrink=...): expected fleet.Shrink(...), found {shrink!r}")
    try:
        policies = combined(entry), shrink or Shrink()
    except TableError as error:
        raise ModelError(f"SparseEmbedding: {error}") from None
    if num_embeddings is not None and policies != (AdmissionEntry(), Shrink()):
        raise ModelError("SparseEmbedding: entry and shrink are for ids without end; leave num_embeddings out")
    return policies


def checked_kind(kind: Any, num_embeddings: int | None) -> str | None:
    """The name of a registered kind of table with rows, and with a size if the layer has one; None for None."""
    has_size = num_embeddings is not None
    fits = [name for name, known in KINDS.items() if not known.is_dense and known.has_size == has_size]
    if kind is not None and kind not in fits:
        size = "with num_embeddings" if has_size else "without num_embeddings"
        raise ModelError(f"SparseEmbedding(kind=...): expected one of {fits} {size}, found {kind!r}")
    return kind  # type: ignore[no-any-return]


def checked_optimizer(optimizer: Any, name: str | None) -> torch.optim.Optimizer | None:
    """An optimizer without parameters, whose options a rule of the servers takes; None for None."""
    if optimizer is None:
        return None
    table = f"SparseEmbedding(optimizer=...){f' of table {name!r}' if name else ''}"
    if not isinstance(optimizer, torch.optim.Optimizer) or not lacks_parameters(optimizer):
        found = f"{type(optimizer).__name__} with parameters" if hasattr(optimizer, "param_groups") else repr(optimizer)
        raise ModelError(
            f"{table}: expected an optimizer of fleet.optim without parameters, such as fleet.optim.FTRL(lr=0.05), "
            f"found {found:.200}"
        )
    try:
        rule_of(optimizer, optimizer.param_groups[0])
    except FleetError as error:
        raise ModelError(f"{table}: {error}") from None
    return optimizer


def checked_storage(storage: Any, num_embeddings: int | None) -> TierStorage:
    """Where the rows are; in memory for None."""
    if storage is None:
        return IN_MEMORY
    if not isinstance(storage, TierStorage):
        raise ModelError(
            f'SparseEmbedding(storage=...): expected fleet.Tiered(memory="8GB", path=...), found {storage!r}'
        )
    if num_embeddings is not None:
        raise ModelError("SparseEmbedding: storage is for ids without end; leave num_embeddings out")
    return storage


def checked_cache(cache: Any) -> int:
    """The bytes of a cache; 0 for None."""
    if cache is None:
        return 0
    try:
        if isinstance(cache, int) and not isinstance(cache, bool) and cache > 0:
            return cache
        return parse_bytes(cache if isinstance(cache, str) else repr(cache), "SparseEmbedding(cache=...)")
    except TableError as error:
        raise ModelError(str(error)) from None


def checked_format(dtype: Any, step: Any, step_rate: Any, wire: Any, bounds: Bounds) -> RowFormat:
    """The type of a row's numbers on the servers and on the network."""
    for field, given, known in (("dtype", dtype, DTYPES), ("step", step, STEPS), ("wire", wire, DTYPES)):
        if given is not None and (not isinstance(given, str) or given not in known):
            raise ModelError(f"SparseEmbedding({field}=...): expected one of {', '.join(known)}, found {given!r:.100}")
    rate = STEP_RATE if step_rate is None else step_rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ModelError(f"SparseEmbedding(step_rate=...): expected a number from 0 to 1, found {rate!r:.100}")
    try:
        made = RowFormat(dtype, "row" if step is None else step, float(rate), wire or "")
    except TableError as error:
        raise ModelError(f"SparseEmbedding: {error}") from None
    if step is not None and dtype != "int8":
        raise ModelError(f"SparseEmbedding: step={step!r} is for dtype='int8'; dtype is {dtype!r}, which has no step")
    if made.is_narrow and bounds != NO_BOUNDS:
        raise ModelError(
            f"SparseEmbedding: weight_bounds={bounds} cannot hold with dtype={dtype!r}, whose rounding may go beyond "
            "them. Leave one of them out."
        )
    return made


def checked_device(device: Any, capacity: Any, storage: TierStorage, kind: str | None) -> tuple[str | None, int | None]:
    """(the device of a table in this process, rows to make room for); both None for a table on servers."""
    if device is None:
        if capacity is not None:
            raise ModelError(f"SparseEmbedding: capacity={capacity!r} is for tables with device=; leave it out")
        return None, None
    if str(device).partition(":")[0] not in ("cuda", "cpu"):
        raise ModelError(f"SparseEmbedding(device=...): expected 'cuda' or 'cpu', found {device!r:.100}")
    if capacity is not None:
        check_whole_number("capacity", capacity, 1, 1 << 30)
    if storage != IN_MEMORY or kind is not None:
        raise ModelError("SparseEmbedding: device= has its rows in this process; storage and kind are for servers")
    return str(device), capacity


def checked_bounds(bounds: Any) -> Bounds:
    """(low, high), as two floats; NO_BOUNDS for None."""
    if bounds is None:
        return NO_BOUNDS
    is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    if not is_pair or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in bounds):
        raise ModelError(
            f"SparseEmbedding: expected weight_bounds=(low, high), found {bounds!r}. Two numbers; one of them may be "
            "infinite (math.inf)."
        )
    low, high = float(bounds[0]), float(bounds[1])
    if not np.float32(low) < np.float32(high):  # servers compute in float32
        raise ModelError(f"SparseEmbedding: weight_bounds must have low below high as float32, found {(low, high)}")
    return low, high
