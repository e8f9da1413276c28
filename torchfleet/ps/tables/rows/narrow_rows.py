"""Rows whose values are stored in fewer bits than float32: changed in float32, and rounded when they are stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchfleet.ps.kernels import rows
from torchfleet.ps.tables.rows.codecs import Arrays, Codec, Dice, Floats, Keys, Words
from torchfleet.ps.tables.rows.keymap import Rows

_CHUNK = 2048  # rows that are changed at a time: they stay in the cache

Change = Callable[[Floats, tuple[int, int], Rows, slice], None]


class NarrowRows:
    """Converts between `stored` rows, [values in words | state] as a table keeps them, and `wide` rows,
    [values | state] in float32. Arrays of stored rows are declared float32 and hold words, as a store does.
    """

    def __init__(self, codec: Codec, num_states: int, stream: np.uint64) -> None:
        """`num_states`: numbers of state of a row; `stream`: the part of random bits that depends on seed and table."""
        self.codec, self._num_states, self._stream = codec, num_states, stream
        self._found: Rows = np.arange(_CHUNK)

    def stored(self, keys: Keys, wide: Floats, are_first: bool = False) -> Floats:
        """Stored rows for wide rows that are set, or (are_first) that are new. Rounds values to the nearest, and copies
        the state if `wide` has it.
        """
        values = np.ascontiguousarray(wide)
        first, dim = self.codec.num_words, self.codec.dim
        words: Words = np.zeros((len(keys), first + values.shape[1] - dim), np.uint32)
        (self.codec.begin if are_first else self.codec.narrow)(keys, values, words)
        words[:, first:] = values.view(np.uint32)[:, dim:]
        return words.view(np.float32)

    def widened(self, stored: Floats) -> Floats:
        """Wide rows, in new memory; with state if `stored` has it."""
        words = np.ascontiguousarray(stored).view(np.uint32)
        first, dim = self.codec.num_words, self.codec.dim
        wide = np.empty((len(words), dim + words.shape[1] - first), np.float32)
        self.codec.widen(words, wide)
        wide.view(np.uint32)[:, dim:] = words[:, first:]
        return wide

    def change(self, store: Floats, layout: tuple[int, int], keys: Keys, at: Rows, change: Change, update: int) -> None:
        """Apply `change` to the distinct rows numbered `at` of a store, whose keys are `keys`, and store the result by
        stochastic rounding. `change` gets a store of wide rows, its layout, row numbers, and their places in `at`.
        """
        width, dim = self.codec.dim + self._num_states, self.codec.dim
        for start in range(0, len(at), _CHUNK):
            some = slice(start, min(start + _CHUNK, len(at)))
            stored = np.empty((some.stop - start, self.codec.num_words + self._num_states), np.float32)
            rows.gather(store, *layout, at[some], stored)
            wide = self.widened(stored)
            before = wide[:, :dim].copy()
            change(wide.reshape(-1), (width, 0), self._found[: len(wide)], some)
            words = stored.view(np.uint32)
            self.codec.update(keys[some], before, wide, words, Dice(self._stream, update))
            words[:, self.codec.num_words :] = wide.view(np.uint32)[:, dim:]
            rows.scatter(store, *layout, at[some], stored)

    def arrays(self, stored: Floats, with_state: bool) -> Arrays:
        """Stored rows as they are saved."""
        words = np.ascontiguousarray(stored).view(np.uint32)
        found = self.codec.arrays(words)
        if with_state and self._num_states:
            found["row_state"] = words[:, self.codec.num_words :].view(np.float32)
        return found

    def from_arrays(self, arrays: Arrays) -> Floats:
        """The inverse of `arrays`. Raises TableError if a value is NaN or infinite, or a step is out of range."""
        words = self.codec.words_of(arrays)
        if "row_state" not in arrays:
            return words.view(np.float32)
        return np.concatenate([words.view(np.float32), arrays["row_state"]], axis=1)
