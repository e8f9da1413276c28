"""Eviction of rows by a policy, in slices, so that the server handles requests in between."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.policies.admission import Candidates
from torchfleet.ps.tables.policies.capacity import least_recent, row_limit
from torchfleet.ps.tables.policies.decisions import Decisions
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.keyrange import KeyRange
from torchfleet.ps.tables.rows.row_statistics import Columns
from torchfleet.ps.tables.rowstore import RowStore
from torchfleet.ps.tables.settings.expressions import Expression, parse
from torchfleet.ps.tables.settings.policy import EVICTION_NAMES, Shrink

SLICE = 8192  # row numbers per slice: one or two milliseconds
FEW = 100  # rows that a shrink may always drop, whatever the share
MAX_ROUNDS = 4  # rounds to reach a capacity: rows looked up during a round stay, and the next round picks other rows

_KEPT = {"unseen_days": "seen", "age_days": "born", "score": "show", "click": "show", "norm": "", "tick": "tick"}
_HOW = {
    "seen": "shrink=fleet.Shrink(delete_after_unseen_days=...)",
    "born": "shrink=fleet.Shrink(ttl_days=...)",
    "tick": "shrink=fleet.Shrink(max_rows=...)",
    "show": "entry=fleet.ShowClickEntry(show, click)",
    "delta": "a shrink=fleet.Shrink(where=...) that uses delta",
    "slot": "a shrink=fleet.Shrink(where=...) that uses slot",
}


def check_policy(table: RowStore, policy: Shrink) -> None:
    """Raise TableError if the table has a declared size or lacks statistics that the policy reads, or if the policy's
    limit leaves this server no row.
    """
    kept = table.statistics.names if table.statistics is not None else ()
    if isinstance(table.index, KeyRange):
        raise TableError(f"table '{table.spec.name}' has a declared size: rows of such tables are not dropped")
    for name in sorted(policy.names):
        column = _KEPT.get(name, name)
        if column and column not in kept:
            raise TableError(
                f"table '{table.spec.name}' keeps no '{column}', which this shrink looks at ({name}). A table keeps "
                f"what it was declared with: give its SparseEmbedding {_HOW[column]}."
            )
    row_limit(table.spec, policy, table.index)  # raises if the limit leaves this server no row


def shrink(table: RowStore, policy: Shrink) -> Iterator[int]:
    """Yield the number of rows that each slice dropped. A row that is looked up before its slice is kept."""
    check_policy(table, policy)
    now = table.clock.now
    where = parse(policy.where, EVICTION_NAMES) if policy.where is not None else None
    if _looks_at_rows(policy) and policy.max_share < 1:
        yield from _check_share(table, policy, where, now)
    if _looks_at_rows(policy):
        for keys in _victims(table, policy, where, now):
            yield _drop(table, keys)
    if table.admission is not None and table.admission.candidates is not None:
        yield from _shrink_candidates(table.admission.candidates, table.decisions, policy, now)
    yield from _shrink_to_capacity(table, policy)


def _check_share(table: RowStore, policy: Shrink, where: Expression | None, now: int) -> Iterator[int]:
    """Count the rows to drop before dropping any. Raises TableError if they exceed the share that the policy allows."""
    num = 0
    for keys in _victims(table, policy, where, now):
        num += len(keys)
        yield 0
    if num > max(FEW, policy.max_share * table.num_rows):
        raise TableError(
            f"table '{table.spec.name}': this shrink would drop {num:,} of {table.num_rows:,} rows, more than "
            f"max_share={policy.max_share:g} of them; nothing was dropped. Check the server's clock ({now} s since "
            "1970). If it is right and these rows should go, allow it: fleet.shrink(..., max_share=1.0), or "
            "shrink=fleet.Shrink(max_share=1.0) of the layer."
        )


def _looks_at_rows(policy: Shrink) -> bool:
    asked = policy.delete_after_unseen_days, policy.delete_threshold, policy.ttl_days, policy.min_norm, policy.where
    return any(value is not None for value in asked)


def _victims(table: RowStore, policy: Shrink, where: Expression | None, now: int) -> Iterator[Keys]:
    """Yield the keys of the rows that the policy drops, of all rows in slices."""
    for keys, kept, values in table.judged(SLICE, "norm" in policy.names):
        columns = {} if table.statistics is None else table.statistics.values(kept, now)
        if values is not None:
            columns["norm"] = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
        is_out = _expired(columns, policy, len(keys))
        if policy.delete_threshold is not None:
            is_out |= columns["score"] < policy.delete_threshold
        if policy.min_norm is not None:
            is_out |= columns["norm"] < policy.min_norm
        yield keys[is_out | where(columns) if where is not None else is_out]


def _expired(columns: Columns, policy: Shrink, num: int) -> npt.NDArray[np.bool_]:
    """Mask of rows or candidates that are unseen for too long or too old."""
    is_out = np.zeros(num, np.bool_)
    if policy.delete_after_unseen_days is not None and "unseen_days" in columns:
        is_out |= columns["unseen_days"] > policy.delete_after_unseen_days
    if policy.ttl_days is not None and "age_days" in columns:
        is_out |= columns["age_days"] > policy.ttl_days
    return is_out


def _shrink_candidates(candidates: Candidates, decisions: Decisions, policy: Shrink, now: int) -> Iterator[int]:
    """Forget candidate keys (without a row) that exceed the policy's time limits."""
    start = 0
    is_asked = policy.delete_after_unseen_days is not None or policy.ttl_days is not None
    while is_asked and start < candidates.index.num_row_numbers:
        rows = np.arange(start, min(start + SLICE, candidates.index.num_row_numbers))
        start += SLICE
        columns = candidates.statistics.values(candidates.statistics.read(rows), now)
        keys = candidates.index.alive(rows[_expired(columns, policy, len(rows))])[0]
        decisions.note("forgotten", keys)
        candidates.erase(keys)
        yield 0


def _shrink_to_capacity(table: RowStore, policy: Shrink) -> Iterator[int]:
    limit = row_limit(table.spec, policy, table.index)
    for _ in range(MAX_ROUNDS):
        if limit is None or table.index.num_keys <= limit:
            return
        for keys in least_recent(table, table.index.num_keys - limit, SLICE):
            yield _drop(table, keys) if keys is not None else 0


def _drop(table: RowStore, keys: Keys) -> int:
    table.decisions.note("dropped", keys)
    num = table.erase(keys)
    table.num_evicted += num
    return num
