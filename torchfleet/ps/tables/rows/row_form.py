"""The two forms of a table's rows outside of its store, and the first values of a new row.

Stored: values in the words of the table's type, and state, as the store has them. Wide: values and state in float32,
as rules and requests see them. In a table of float32 the two are the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import random, rows
from torchfleet.ps.tables.rows.codecs import SCALE, stored_codec
from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.rows.narrow_rows import NarrowRows
from torchfleet.ps.tables.settings.spec import Floats, TableSpec

Layout = tuple[int, int]  # of a store: words per row, and where in a row the values begin

_KINDS = {
    "constant": random.CONSTANT,
    "uniform": random.UNIFORM,
    "normal": random.NORMAL,
    "truncated_normal": random.TRUNCATED_NORMAL,
}


class RowForm:
    """The rows of one table. Words of stored rows are in arrays of float32, as in the store."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec, num_states = spec, spec.num_words - spec.dim
        self.row_words, self.value_words = spec.stored_words, spec.stored_words - num_states  # of a stored row
        self.stream = value_stream(spec.seed, spec.name)
        codec = stored_codec(spec.format, spec.dim)
        self.narrow = None if codec is None else NarrowRows(codec, num_states, self.stream)

    def stored(self, keys: Keys, wide: Floats) -> Floats:
        """Wide rows, with or without state, as they are stored."""
        return wide if self.narrow is None else self.narrow.stored(keys, wide)

    def widened(self, stored: Floats) -> Floats:
        """The inverse of `stored`."""
        return stored if self.narrow is None else self.narrow.widened(stored)

    def begin(self, store: Floats, layout: Layout, keys: Keys, at: Rows, fresh: npt.NDArray[np.int64]) -> None:
        """Give the rows at[fresh] of a store, whose keys are keys[fresh], their first values and state."""
        if self.narrow is None:
            self.begin_wide(store, layout, keys, at, fresh)
            return
        rows.scatter(store, *layout, at[fresh], self.first_stored(keys[fresh]))

    def first_stored(self, keys: Keys) -> Floats:
        """The stored rows that these keys begin with."""
        num_words, every = self._spec.num_words, np.arange(len(keys))
        first = np.empty((len(keys), num_words), np.float32)
        self.begin_wide(first.reshape(-1), (num_words, 0), keys, every, every)
        return first if self.narrow is None else self.narrow.stored(keys, first, are_first=True)

    def begin_wide(self, store: Floats, layout: Layout, keys: Keys, at: Rows, fresh: npt.NDArray[np.int64]) -> None:
        """`begin` for a store of wide rows."""
        first, rule = self._spec.initializer, self._spec.rule
        state = rule.row_rule.initial_state(rule)
        random.initialise(
            store, *layout, self._spec.dim, keys, at, fresh, self.stream,
            _KINDS[first.name], first.a, first.b, np.float32(state),
        )  # fmt: skip

    def arrays(self, stored: Floats, with_state: bool) -> dict[str, npt.NDArray[Any]]:
        """Stored rows as a save has them: `rows` of float32, or narrow values beside their state."""
        if self.narrow is not None:
            return self.narrow.arrays(stored, with_state)
        return {"rows": stored[:, : self._spec.num_words if with_state else self._spec.dim]}

    def from_arrays(self, arrays: dict[str, npt.NDArray[Any]]) -> Floats:
        """Stored rows from the narrow `arrays` of a table of the same type; takes them out of `arrays`."""
        if self.narrow is None:
            raise TableError(f"table '{self._spec.name}' has rows of float32, found rows of {sorted(arrays)}")
        narrow = {name: arrays.pop(name) for name in ("row_values", SCALE, "row_state") if name in arrays}
        return self.narrow.from_arrays(narrow)


def value_stream(seed: int, name: str) -> np.uint64:
    """The part of a row's initial value that depends on (seed, table). Uses the name, not the order of creation."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    stream: np.uint64 = np.uint64(int.from_bytes(digest, "little"))
    return stream
