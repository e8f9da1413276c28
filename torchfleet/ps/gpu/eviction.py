"""Rows that leave a table on a device: by the table's limit, and by a shrink."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import torch

from torchfleet.base.errors import TableError
from torchfleet.ps.gpu.admission import Admission
from torchfleet.ps.gpu.kernels.kernel_choice import Kernels
from torchfleet.ps.gpu.row_blocks import RowBlock
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import TableMemory
from torchfleet.ps.tables.settings.clock import DAY
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.row_format import FLOAT32
from torchfleet.ps.tables.settings.spec import TableSpec, shard_range

DIRECTORY_BYTES = 36  # per row, beside the row itself: entries of the directory, the key, the list of free rows
SHARE = 32  # an eviction drops at least this fraction of the rows, so that it is rare
_ON_DEVICES = frozenset({"tick", "unseen_days", "age_days", "norm"})


class EvictableTable(Protocol):
    """What eviction needs from a table (implemented by DeviceTable)."""

    spec: TableSpec
    layout: RowLayout
    memory: TableMemory
    kernels: Kernels
    max_rows: int | None
    admission: Admission | None

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def step(self) -> int: ...

    def find(self, keys: torch.Tensor, insert: bool = False) -> torch.Tensor: ...

    def rows(self, num_rows: int = ...) -> Iterator[RowBlock]: ...

    def remove(self, keys: torch.Tensor) -> int: ...


def check_policies(spec: TableSpec) -> None:
    """Raise TableError for a shrink or a dtype that tables on devices do not have."""
    unknown = sorted(spec.shrink.names - _ON_DEVICES) or (["where"] if spec.shrink.where is not None else [])
    if unknown:
        raise TableError(
            f"table '{spec.name}': on a device, shrink= has max_rows, max_bytes, delete_after_unseen_days, ttl_days "
            f"and min_norm; found one that looks at {', '.join(unknown)}"
        )
    if spec.format != FLOAT32:
        raise TableError(f"table '{spec.name}': rows on a device are float32, found dtype='{spec.format.dtype}'")


def row_limit(spec: TableSpec, policy: Shrink, width: int) -> int | None:
    """The most rows of this shard, by max_rows and max_bytes of the policy; None if only memory limits it."""
    limits = [] if policy.max_rows is None else [policy.max_rows]
    if policy.max_bytes is not None:
        limits.append(policy.max_bytes // (4 * width + DIRECTORY_BYTES))
    if not limits:
        return None
    if min(limits) < spec.num_shards:  # alike on all ranks, which would otherwise wait for those that raised
        raise TableError(
            f"table '{spec.name}': max_rows or max_bytes allows {min(limits)} rows, fewer than its {spec.num_shards} "
            "ranks: raise it"
        )
    start, stop = shard_range(min(limits), spec.shard, spec.num_shards)
    return stop - start


def make_room(table: EvictableTable, keys: torch.Tensor) -> int:
    """Drop the least recently used rows, so that new rows for these keys fit. Rows looked up since the last update
    stay. Returns how many rows were dropped.
    """
    assert table.max_rows is not None
    distinct = torch.unique(keys)
    slots = table.find(distinct)
    table.kernels.stamp(table.memory, table.layout, slots, int(time.time()))
    num_new = int((slots < 0).sum())
    excess = table.num_rows + num_new - table.max_rows
    return drop_oldest(table, excess, max(excess, table.max_rows // SHARE)) if excess > 0 else 0


def drop_oldest(table: EvictableTable, least: int, most: int) -> int:
    """Drop the `most` least recently used rows, or fewer: rows looked up since the last update stay. Returns how many
    were dropped. Raises TableError, with nothing dropped, if these would be fewer than `least`.
    """
    place = table.layout.num_words + table.layout.columns.index("tick")
    keys, ticks = [], []
    for block in table.rows():
        keys.append(block.keys)
        ticks.append(table.memory.rows.read(block.slots, place, place + 1).view(torch.int32).squeeze(1))
    every, when = torch.cat(keys), torch.cat(ticks)
    old = (when < table.step).nonzero().squeeze(1)
    if len(old) < least:
        raise TableError(
            f"table '{table.name}' may have {table.max_rows:,} rows (shrink=), and the step needs {least - len(old):,} "
            "more at once: raise max_rows, or use smaller batches"
        )
    _, order = torch.sort(when[old], stable=True)
    return table.remove(every[old[order[:most]]])


def shrink(table: EvictableTable, policy: Shrink) -> int:
    """Drop rows by a policy; returns how many. Raises TableError if the table does not keep what the policy reads."""
    check_policies(table.spec)
    columns = {"unseen_days": "seen", "age_days": "born", "tick": "tick"}
    for name in sorted(policy.names & columns.keys()):
        if columns[name] not in table.layout.columns:
            raise TableError(
                f"table '{table.name}' keeps no '{columns[name]}', which this shrink looks at ({name}): declare it "
                "with shrink= of its SparseEmbedding"
            )
    limit = row_limit(table.spec, policy, table.layout.width)  # raises if it leaves this shard no row
    victims = [_victims(block, table.dim, policy) for block in table.rows()]
    num = sum(len(keys) for keys in victims)
    if num > max(100, policy.max_share * table.num_rows):
        raise TableError(
            f"table '{table.name}': this shrink would drop {num:,} of {table.num_rows:,} rows, more than "
            f"max_share={policy.max_share:g} of them; nothing was dropped. If these rows should go, allow it with "
            "max_share=1.0."
        )
    dropped = table.remove(torch.cat(victims)) if victims else 0
    if table.admission is not None:
        table.admission.forget(policy, int(time.time()))
    if limit is not None and (excess := table.num_rows - limit) > 0:
        dropped += drop_oldest(table, excess, excess)
    return dropped


def _victims(block: RowBlock, dim: int, policy: Shrink) -> torch.Tensor:
    """The keys of the rows that a policy drops."""
    is_out = torch.zeros(len(block.keys), dtype=torch.bool, device=block.keys.device)
    now = int(time.time())
    if policy.delete_after_unseen_days is not None:
        is_out |= (now - block.columns["seen"].long()) > policy.delete_after_unseen_days * DAY
    if policy.ttl_days is not None:
        is_out |= (now - block.columns["born"].long()) > policy.ttl_days * DAY
    if policy.min_norm is not None:
        is_out |= block.words[:, :dim].double().norm(dim=1) < policy.min_norm
    return block.keys[is_out]
