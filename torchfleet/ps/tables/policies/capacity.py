"""A limit on the rows of a table: the least recently looked-up rows are evicted for new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.hashing import hashes as hashes_of
from torchfleet.ps.kernels.statistics import NEVER
from torchfleet.ps.tables.policies.decisions import Decisions
from torchfleet.ps.tables.rows.keymap import KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.keyrange import KeyRange
from torchfleet.ps.tables.rows.packed_map import PackedMap
from torchfleet.ps.tables.rows.row_statistics import Statistics
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import TableSpec, shard_range

SWEEP = 4096  # rows dropped at once
SAMPLE = 1 << 14  # rows sampled to estimate the ticks of the oldest
SHARE = 0.1  # share of the rows that one lap may drop: the oldest ones
MAP_BYTES = 18  # per row, beside the row itself: map slots and an entry in the list of free rows
NUM_DIGITS = 6  # digits of 16 bits in a rank: two of the tick, four of the hash


def row_limit(spec: TableSpec, policy: Shrink, index: KeyMap | KeyRange | PackedMap) -> int | None:
    """The maximum number of rows of this shard; None if only memory limits it."""
    limits = []
    if policy.max_rows is not None:
        limits.append(policy.max_rows)
    if policy.max_bytes is not None:
        limits.append(policy.max_bytes // (4 * index.width + MAP_BYTES))
    if not limits:
        return None
    if min(limits) < spec.num_shards:  # every server raises the same error, so none of them starts
        raise TableError(
            f"table '{spec.name}': max_rows or max_bytes allows {min(limits)} rows, which leaves none for some of the "
            f"{spec.num_shards} servers; raise it"
        )
    start, stop = shard_range(min(limits), spec.shard, spec.num_shards)
    return min(stop - start, index.max_rows)


class EvictableRows(Protocol):
    """What Capacity needs from a row store (implemented by RowStore)."""

    spec: TableSpec
    index: KeyMap | KeyRange | PackedMap
    statistics: Statistics | None
    num_evicted: int
    decisions: Decisions

    def drop(self, keys: Keys, at: Rows) -> int:
        """Erase keys that are known to be in these rows."""
        ...


class Capacity:
    """A clock hand that sweeps the rows and drops those whose last lookup is among the oldest tenth.

    The cut-off tick is estimated from a sample once per lap, so lookups keep no ordered list.
    """

    def __init__(self, table: EvictableRows, max_rows: int) -> None:
        self.max_rows = max_rows
        self._table = table
        self._hand = self._cut = 0

    def has_room(self, num_new: int) -> bool:
        """Whether this many new rows fit without dropping any."""
        return self._table.index.num_keys + num_new <= self.max_rows

    def make_room(self, num_new: int, in_use: Rows) -> None:
        """Drop rows until `num_new` new rows fit. `in_use`: rows that must stay; negative numbers are ignored. Raises
        TableError if both together exceed the capacity. Does nothing while recorded decisions are followed.
        """
        table = self._table
        assert isinstance(table.index, KeyMap)
        if table.decisions.followed is not None:
            return
        excess = table.index.num_keys + num_new - self.max_rows
        if excess <= 0:
            return
        in_use = in_use[in_use >= 0]
        if num_new + len(in_use) > self.max_rows:  # in_use may contain repeats
            in_use = np.unique(in_use)
            self.check(num_new + len(in_use))
        self._drop(excess, in_use)

    def check(self, num_needed: int) -> None:
        """Raise TableError if one batch needs more rows than the capacity."""
        if num_needed > self.max_rows:
            raise TableError(
                f"table '{self._table.spec.name}' may have {self.max_rows:,} rows on this server, and one batch needs "
                f"{num_needed:,}. Raise max_rows or max_bytes."
            )

    def _drop(self, excess: int, in_use: Rows) -> None:
        """Drop `excess` rows, in laps. Each lap drops rows up to the tick that bounded the oldest tenth when the lap
        began.
        """
        table = self._table
        assert isinstance(table.index, KeyMap)
        assert table.statistics is not None
        oldest_in_use = int(table.statistics.column("tick", in_use).min()) if len(in_use) else int(NEVER)
        at_start, is_first = excess, True
        while excess > 0:
            if self._hand == 0:
                has_found_none = not is_first and excess == at_start
                self._cut = int(NEVER) - 1 if has_found_none else self._oldest_tick()
                at_start, is_first = excess, False
            num_rows = table.index.num_row_numbers
            old, stop = table.statistics.oldest(self._hand, num_rows, self._cut, min(excess, SWEEP))
            self._hand = stop if stop < num_rows else 0
            if self._cut >= oldest_in_use:
                old = old[~np.isin(old, in_use)]
            keys = table.index.keys_of(old)
            table.decisions.note("dropped", keys)
            table.drop(keys, old)
            table.num_evicted += len(old)
            excess -= len(old)

    def _oldest_tick(self) -> int:
        """The tick at or before which a tenth of the rows were last looked up."""
        table = self._table
        assert isinstance(table.index, KeyMap)
        assert table.statistics is not None
        num = table.index.num_row_numbers
        return old_tick(table.statistics.column("tick", np.arange(0, num, max(1, num // SAMPLE))))


def old_tick(ticks: npt.NDArray[np.uint32]) -> int:
    """The tick at or before which a tenth of the rows were last used, estimated from a sample; 0 without used rows."""
    used = ticks[ticks != NEVER]
    place = int(len(used) * SHARE)
    return int(np.partition(used, place)[place]) if len(used) else 0


def least_recent(table: EvictableRows, num: int, slice_rows: int) -> Iterator[Keys | None]:
    """The keys of exactly the `num` least recently looked-up rows; ties are broken by the smaller hash. Works in
    slices: yields None while the cut-off is still being computed.

    The rank of a row is (tick, hash): 96 bits. Its 16-bit digits are counted one after the other, each among the rows
    that share all digits before it, until the rank below which `num` rows lie is known.
    """
    prefix: list[int] = []
    remaining = num
    while len(prefix) < NUM_DIGITS:
        counts = np.zeros(1 << 16, np.int64)
        for _, digits in _slices(table, slice_rows, len(prefix) + 1):
            same = np.logical_and.reduce([digits[i] == digit for i, digit in enumerate(prefix)], axis=0)
            counts += np.bincount(digits[-1][same] if prefix else digits[-1], minlength=1 << 16)
            yield None
        ends = np.cumsum(counts)
        if remaining >= ends[-1]:  # some of these rows were looked up or dropped meanwhile: drop all that are left
            break
        digit = int(np.searchsorted(ends, remaining))  # the least digit such that enough rows have it or a smaller one
        prefix.append(digit)
        remaining -= int(ends[digit] - counts[digit])
        if remaining == counts[digit]:
            break
    for keys, digits in _slices(table, slice_rows, len(prefix)):
        below = np.zeros(len(keys), np.bool_)
        equal = np.ones(len(keys), np.bool_)
        for own, digit in zip(digits, prefix, strict=True):
            below |= equal & (own < digit)
            equal &= own == digit
        yield keys[below | equal]


def _slices(table: EvictableRows, num_rows: int, num_digits: int) -> Iterator[tuple[Keys, list[npt.NDArray[np.int64]]]]:
    """Keys of the rows in use and the first digits of their ranks."""
    assert isinstance(table.index, KeyMap)
    assert table.statistics is not None
    start = 0
    while start < table.index.num_row_numbers:
        rows = np.arange(start, min(start + num_rows, table.index.num_row_numbers))
        ticks = table.statistics.column("tick", rows)
        rows, ticks = rows[ticks != NEVER], ticks[ticks != NEVER]
        keys = table.index.keys_of(rows)
        digits = [(ticks >> np.uint32(16)).astype(np.int64), (ticks & np.uint32(0xFFFF)).astype(np.int64)]
        if num_digits > 2:
            hashes = hashes_of(keys)
            digits += [((hashes >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.int64) for s in (48, 32, 16, 0)]
        yield keys, digits[:num_digits]
        start += num_rows
