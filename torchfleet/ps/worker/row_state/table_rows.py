"""What the embeddings of one table and their copies share: the lookup engine, the row source, and initial rows."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchfleet.base.errors import FleetError, ModelError
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.row_state.whole_rows import SLICE, RowSource, WholeRows, fetch

_own = threading.local()


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Within this context and thread, state_dict() has empty weights for embeddings, and fetches nothing."""
    before = getattr(_own, "is_without", False)
    _own.is_without = True
    try:
        yield
    finally:
        _own.is_without = before


def is_without_rows() -> bool:
    return getattr(_own, "is_without", False)


class TableRows:
    """State of one table. Every embedding has one; those of the same name share it once the model is distributed."""

    def __init__(self, padding_idx: int | None) -> None:
        self.engine: Any = None  # where lookups go; None before init_worker
        self.source: RowSource | None = None  # where all rows are; None before init_worker
        self.first_keys: np.ndarray[Any, Any] | None = None  # signed; None: first_values are those of 0, 1, ...
        self.first_values: np.ndarray[Any, Any] | None = None
        self.loaded: WholeRows | None = None  # rows from load_state_dict, on their way to the servers
        self.padding = padding_idx  # common to all embeddings of the table; None if they differ
        self.is_distributed = False  # part of a distributed model: a copy of an embedding reads the same rows
        self._last: tuple[Any, Any, Any] | None = None
        self.reading: torch.Tensor | None = None  # all rows, while a prediction computes with them

    def __deepcopy__(self, memo: dict[int, Any]) -> TableRows:
        if self.is_distributed:
            return self
        made = TableRows(self.padding)
        made.first_keys, made.first_values = copy.deepcopy(self.first_keys), copy.deepcopy(self.first_values)
        return made

    def take_over(self, other: TableRows) -> None:
        """Merge another embedding of the same table into this one."""
        self.padding = self.padding if self.padding == other.padding else None
        if self.first_values is None:
            self.first_keys, self.first_values = other.first_keys, other.first_values

    def begin_with(self, rows: WholeRows) -> None:
        """Set the initial values. They are copied."""
        self.first_keys = None if rows.keys is None else np.array(rows.keys.numpy(), np.int64)
        self.first_values = np.array(rows.values.numpy(), np.float32)

    def whole(self, spec: TableSpec, as_read: bool = False) -> WholeRows:
        """All rows, as `fetch` returns them: the servers', or the initial ones before there are servers."""
        return fetch(self.source or FirstRows(self), spec, self.padding, as_read)

    def for_reading(self, spec: TableSpec, device: torch.device) -> torch.Tensor:
        """All rows, as a prediction reads them: fetched once, and kept until `end_reading`."""
        if self.reading is not None and self.reading._version:
            self.end_reading()
        if self.reading is None or self.reading.device != device:
            with torch.inference_mode(False):  # an inference tensor could not be used outside of that mode
                self.reading = self.whole(spec, as_read=True).values.to(device)
        return self.reading

    def end_reading(self) -> None:
        """Drop the rows of `for_reading`: they may change. Raises ModelError if the caller wrote into them."""
        kept, self.reading = self.reading, None
        if kept is not None and kept._version:
            raise ModelError(
                "the weight of an embedding was written to in eval mode, where it is a copy of its rows, "
                "which are on the servers. Set rows before fleet.distributed_model, or by model.load_state_dict."
            )

    def whole_for(self, spec: TableSpec, destination: Any) -> WholeRows:
        """As `whole`, once for all embeddings whose states go into the same `destination`."""
        if self._last is not None:
            made_for, keys, values = (None if part is None else part() for part in self._last)
            if made_for is destination and values is not None:
                return WholeRows(keys, values)
        rows = self.whole(spec)
        with contextlib.suppress(TypeError):  # a plain dict has no weak references, so its rows are fetched again
            parts = (destination, rows.keys, rows.values)
            # Weak, so that this cache does not keep the rows alive.
            self._last = tuple(None if part is None else weakref.ref(part) for part in parts)  # type: ignore[assignment]
        return rows


class FirstRows:
    """The initial rows of a table, as far as they are given."""

    def __init__(self, rows: TableRows) -> None:
        self._keys, self._values = rows.first_keys, rows.first_values

    def walk(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        yield from slices(self._keys, self._values)

    def num_rows(self, table: str) -> int:
        return 0 if self._values is None else len(self._values)

    def check_writable(self) -> None:
        """Does nothing: rows are writable until init_worker."""


class NoTable:
    """The source of an embedding whose rows are no longer available."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def walk(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        raise FleetError(self._reason)

    def num_rows(self, table: str) -> int:
        raise FleetError(self._reason)

    def check_writable(self) -> None:
        raise FleetError(self._reason)


def slices(
    keys: np.ndarray[Any, Any] | torch.Tensor | None, values: np.ndarray[Any, Any] | torch.Tensor | None
) -> Iterator[tuple[Keys, Floats]]:
    """Yield (keys, rows) in chunks. Without keys the rows are those of the ids 0, 1, ..."""
    for start in range(0, 0 if values is None else len(values), SLICE):
        rows = np.asarray(values[start : start + SLICE], np.float32)  # type: ignore[index]
        some = np.arange(start, start + len(rows)) if keys is None else np.asarray(keys[start : start + SLICE])
        yield some.astype(np.int64).view(np.uint64), rows
