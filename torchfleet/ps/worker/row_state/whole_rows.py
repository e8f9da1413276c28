"""All rows of a table in host memory: joined from chunks, with initial values for declared ids without a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import ModelError
from torchfleet.base.monitor.progress import Progress
from torchfleet.ps.tables.rows.memory import available_bytes, max_table_bytes
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.shard import Floats, Keys

SLICE = 1 << 16  # rows
_GROWTH = 1.25


class WholeRows(NamedTuple):
    """Rows of a table. `keys`: their ids, signed, ascending; None: rows are those of the ids 0, 1, ..."""

    keys: torch.Tensor | None
    values: torch.Tensor


class RowSource(Protocol):
    """A source of all rows of a table."""

    def walk(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        """Yield (keys, values) in chunks; a later row replaces an earlier one of the same key. The arrays are valid
        only until the next iteration.
        """
        ...

    def num_rows(self, table: str) -> int:
        """The approximate number of rows."""
        ...

    def check_writable(self) -> None:
        """Raise FleetError if rows cannot be written now."""
        ...


def fetch(source: RowSource, spec: TableSpec, padding: int | None, as_read: bool = False) -> WholeRows:
    """All rows of a table, in new memory. Raises ModelError, before it begins, if they do not fit into memory.

    With a declared size: a row for every id. An id without a row on the servers gets its initial value, from which
    training would start, and `padding` gets zeros; `as_read`: zeros for both, as a prediction reads them.
    """
    num_rows = spec.size if spec.has_size else source.num_rows(spec.name)
    _check_memory(spec, num_rows, spec.dim)
    progress = Progress(f"rows of table '{spec.name}'")
    if not spec.has_size:
        rows = _keyed(source, spec, spec.dim, num_rows, progress)
    else:
        values, has_row = _sized(source, spec, spec.dim, progress)
        if not as_read:
            _fill(spec, values, has_row, padding)
        rows = WholeRows(None, torch.from_numpy(values))
    progress.end(f"{len(rows.values):,} are here")
    return rows


def fetch_states(source: RowSource, spec: TableSpec) -> WholeRows:
    """As `fetch` for the optimizer's state of all rows, which is what `source` walks over: (rows, num_words - dim). An
    id without a row has the initial state.
    """
    width = spec.num_words - spec.dim
    num_rows = spec.size if spec.has_size else source.num_rows(spec.name)
    _check_memory(spec, num_rows, 2 * width)  # it is cut into tensors
    progress = Progress(f"state of table '{spec.name}'")
    if not spec.has_size:
        rows = _keyed(source, spec, width, num_rows, progress)
    else:
        values, has_row = _sized(source, spec, width, progress)
        values[~has_row] = spec.rule.row_rule.initial_state(spec.rule)
        rows = WholeRows(None, torch.from_numpy(values))
    progress.end(f"{len(rows.values):,} are here")
    return rows


def first_rows(spec: TableSpec, keys: Keys) -> Floats:
    """The initial values that the servers give to these ids; they depend only on seed, table and id."""
    return SparseTable(spec.in_memory(Rule(lr=0.0)), max_table_bytes()).look_up(keys)


def _sized(source: RowSource, spec: TableSpec, width: int, progress: Progress) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(values by id, zeros for ids without a row; mask of the ids with a row)."""
    values, has_row = np.zeros((spec.size, width), np.float32), np.zeros(spec.size, np.bool_)
    done = 0
    for keys, some in source.walk(spec.name):
        values[keys.view(np.int64)] = some
        has_row[keys.view(np.int64)] = True
        done += len(keys)
        progress.show(f"{done:,} of {spec.size:,}")
    return values, has_row


def _fill(spec: TableSpec, values: Floats, has_row: npt.NDArray[np.bool_], padding: int | None) -> None:
    missing = np.flatnonzero(~has_row)
    for start in range(0, len(missing), SLICE):
        some = missing[start : start + SLICE]
        values[some] = first_rows(spec, some.astype(np.uint64))
    if padding is not None and 0 <= padding < len(values) and not has_row[padding]:
        values[padding] = 0.0


def _keyed(source: RowSource, spec: TableSpec, width: int, num_rows: int, progress: Progress) -> WholeRows:
    """Allocates room for the announced number of rows, and more if there turn out to be more."""
    keys, values, done = np.empty(num_rows, np.int64), np.empty((num_rows, width), np.float32), 0
    for some, rows in source.walk(spec.name):
        end = done + len(some)
        if end > len(keys):
            room = max(end, int(_GROWTH * len(keys)))
            keys, values = np.resize(keys, room), np.resize(values, (room, width))
        keys[done:end], values[done:end] = some.view(np.int64), rows
        done = end
        progress.show(f"{done:,} of about {num_rows:,}")
    sorted_keys, from_end = np.unique(keys[:done][::-1], return_index=True)
    return WholeRows(torch.from_numpy(sorted_keys), torch.from_numpy(values[done - 1 - from_end]))


def _check_memory(spec: TableSpec, num_rows: int, width: int) -> None:
    """Rows by key need twice the memory while they are sorted."""
    needed = num_rows * (4 * width + 1) if spec.has_size else 2 * num_rows * (4 * width + 8)
    free = available_bytes()
    if needed > free:
        raise ModelError(
            f"table '{spec.name}' has {num_rows:,} rows of {width} numbers: {needed / 1e9:,.1f} GB are needed to "
            f"hold it here, and {free / 1e9:,.1f} GB are free. Save it with fleet.save(dirname), where every server "
            "writes its own share; SparseEmbedding(..., state='none') leaves it out of state_dict()."
        )
