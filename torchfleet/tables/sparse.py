"""Rows by key: `[key | value | optimizer state]` in one float32 store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.errors import TableError
from torchfleet.kernels import random, rows
from torchfleet.kernels.merge import sum_by_key
from torchfleet.tables.keymap import KeyMap, Keys, Rows
from torchfleet.tables.keyrange import KeyRange
from torchfleet.tables.rules import Floats, apply_to_rows, learning_rate, num_states
from torchfleet.tables.spec import TableSpec
from torchfleet.tables.staleness import Staleness

CHUNK = 2048  # keys taken through find and then through the next kernel while their rows are still in the cache
_KINDS = {
    "constant": random.CONSTANT,
    "uniform": random.UNIFORM,
    "normal": random.NORMAL,
    "truncated_normal": random.TRUNCATED_NORMAL,
}


class SparseTable:
    """Any number of rows; owned by one thread. Every method that raises TableError has changed nothing."""

    def __init__(self, spec: TableSpec, max_bytes: int) -> None:
        self.spec = spec
        self.step = 0
        self.num_loaded = 0  # rows that came from a saved model
        self.staleness = Staleness()
        num_words = spec.dim * (1 + num_states(spec.rule))
        self._index: KeyMap | KeyRange
        if spec.kind == "array":
            self._index = KeyRange(num_words, max_bytes, spec.size, spec.part, spec.num_parts)
        else:
            self._index = KeyMap(num_words, max_bytes)
        self._layout = (self._index.width, self._index.offset)
        self._row_words = num_words
        self._stream = _stream(spec.seed, spec.name)
        self._found: Rows = np.empty(CHUNK, np.int64)

    def pull(self, keys: Keys, create: bool = True) -> Floats:
        """Values for `keys`, shape (len(keys), dim), in a new array. Keys may repeat.

        Missing keys get a row with its first value, or with create=False no row and zeros.
        """
        self.check_keys(keys, create)
        out = np.empty((len(keys), self.spec.dim), np.float32)
        for start in range(0, len(keys), CHUNK):
            at = self._locate(keys[start : start + CHUNK], create, self.spec.dim)
            rows.gather(self._index.store, *self._layout, at, out[start : start + CHUNK])
        return out

    def check_keys(self, keys: Keys, create: bool = False) -> None:
        """Raise TableError if these keys cannot be looked up, or (create) if there is no room for the new ones."""
        self._index.check(keys)
        if not create:
            return
        num_new, room = len(keys), self._index.num_free_rows
        if num_new > min(room, self._index.easy_room):
            num_new = len(np.unique(self.absent(keys)))
        if num_new > room:
            raise TableError(
                f"table '{self.spec.name}' is full: {self._index.num_keys:,} rows, {num_new:,} new keys, room for "
                f"{room:,} rows. Give the server a larger max_table_bytes, use more servers, or evict."
            )
        self._index.reserve(num_new)

    def check_push(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """Raise TableError if `push` could not take this."""
        _check_block(self.spec, keys, grads, self.spec.dim, "gradients")
        learning_rate(self.spec.rule, lr, 1)
        self.check_keys(keys, create=True)

    def push(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """One update: gradients of equal keys are summed, then the rule is applied once per key."""
        self.check_push(keys, grads, lr)
        self.update(keys, grads, lr)

    def update(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """`push` for what `check_push` has passed: a message is checked whole before any of it is applied."""
        self.step += 1
        rate = learning_rate(self.spec.rule, lr, self.step)
        keys, grads = sum_by_key(keys, grads)
        for start in range(0, len(keys), CHUNK):
            at = self._locate(keys[start : start + CHUNK], True, self._row_words)
            chunk = grads[start : start + CHUNK]
            apply_to_rows(self.spec.rule, self._index.store, self._layout, at, chunk, rate, self.step)

    def add(self, keys: Keys, deltas: Floats) -> None:
        """value ← value + delta, for differences that another copy of the rows has learned."""
        self.check_push(keys, deltas)
        self.step += 1
        keys, deltas = sum_by_key(keys, deltas)
        for start in range(0, len(keys), CHUNK):
            at = self._locate(keys[start : start + CHUNK], True, self.spec.dim)
            rows.sgd(self._index.store, *self._layout, at, deltas[start : start + CHUNK], -1.0, -np.inf, np.inf)

    def check_assign(self, keys: Keys, values: Floats) -> None:
        self.check_values(keys, values)
        self.check_keys(keys, create=True)

    def assign(self, keys: Keys, values: Floats) -> None:
        """Set values, or values and state when the rows are that wide. Of equal keys the last one stands."""
        self.check_assign(keys, values)
        is_whole = values.shape[1] == self._row_words  # then nothing of a first value would remain
        for start in range(0, len(keys), CHUNK):
            at = self._locate(keys[start : start + CHUNK], True, self._row_words, initialise=not is_whole)
            rows.scatter(self._index.store, *self._layout, at, values[start : start + CHUNK])

    def load(self, keys: Keys, values: Floats) -> None:
        """`assign` for many rows that `check_values` has passed, with room `reserve`d: several times as fast."""
        self.check_keys(keys)
        has_room = values.shape[1] == self._row_words and len(keys) <= self._index.num_free_rows
        if not (has_room and self._index.load(keys, values)):
            self.assign(keys, values)

    def check_values(self, keys: Keys, values: Floats) -> None:
        """Raise TableError if these cannot be rows of this table; touches nothing, so any thread may call it."""
        num_words = self._row_words if values.shape[1:] == (self._row_words,) else self.spec.dim
        _check_block(self.spec, keys, values, num_words, f"values (or {self._row_words} with state)")

    def erase(self, keys: Keys) -> int:
        """Drop rows; absent keys are passed over. Returns how many were there. Their memory is reused."""
        self.check_keys(keys)
        return self._index.erase(keys)

    def chunks(self, num_rows: int = 1 << 16) -> Iterator[tuple[Keys, Floats]]:
        """All rows as (keys, values and state side by side), in pieces.

        Rows may be pulled, pushed, added and erased between two pieces: a row that lives throughout comes exactly
        once, with value and state that belong together.
        """
        start = 0
        while start < self._index.num_row_numbers:
            keys, at = self._index.live(start, start + num_rows)
            out = np.empty((len(keys), self._row_words), np.float32)
            rows.gather(self._index.store, *self._layout, at, out)
            yield keys, out
            start += num_rows

    @property
    def num_words(self) -> int:
        """Numbers per row: values and state."""
        return self._row_words

    def stats(self) -> dict[str, Any]:
        return {
            "loaded": self.num_loaded,
            "rows": self._index.num_keys,
            "bytes": self._index.num_bytes,
            "load_factor": self._index.load_factor,
            "step": self.step,
            "staleness": self.staleness.counts(),
        }

    def absent(self, keys: Keys) -> Keys:
        """Those of `keys` that have no row."""
        chunks = [keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK)]
        return np.concatenate([chunk[self._locate(chunk, False, 0) < 0] for chunk in chunks] or [keys])

    def reserve(self, num_rows: int) -> None:
        """Make room for so many new rows in one go: before they are loaded, when nobody waits for an answer."""
        self._index.reserve_at_once(min(num_rows, self._index.num_free_rows))

    def _locate(self, keys: Keys, create: bool, num_words: int, initialise: bool = True) -> Rows:
        """Row numbers of `keys`, valid until the next call; `num_words` of each row are about to be used."""
        at = self._found[: len(keys)]
        if self._index.find(keys, at, num_words) and create:
            fresh = self._index.insert_missing(keys, at)
            if not initialise:
                return at
            first, rule = self.spec.initializer, self.spec.rule
            state = rule.initial_accumulator if rule.name == "adagrad" else 0.0
            random.initialise(
                self._index.store, *self._layout, self.spec.dim, keys, at, fresh, self._stream,
                _KINDS[first.name], first.a, first.b, np.float32(state),
            )  # fmt: skip
        return at


def _stream(seed: int, name: str) -> np.uint64:
    """What (seed, table) contribute to a row's first value; by name, so that the order of creation plays no part."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    stream: np.uint64 = np.uint64(int.from_bytes(digest, "little"))
    return stream


def _check_block(spec: TableSpec, keys: npt.NDArray[np.uint64], block: Floats, num_words: int, what: str) -> None:
    if block.ndim != 2 or block.shape != (len(keys), num_words):
        raise TableError(
            f"table '{spec.name}' expects {what} of shape ({len(keys)}, {num_words}) for {len(keys)} keys, "
            f"found {block.shape}"
        )
    if not rows.all_finite(block.reshape(-1).view(np.uint32)):
        is_bad = ~np.isfinite(block)
        is_bad[:, spec.dim :] = np.isnan(block[:, spec.dim :])  # the square of a gradient that was taken may overflow
        if is_bad.any():
            row = int(np.flatnonzero(is_bad.any(axis=1))[0])
            raise TableError(
                f"table '{spec.name}': NaN or infinity in the row for key {int(keys[row])} (row {row} of {len(keys)}); "
                "nothing was applied. Look for it in the loss, or clip the gradients."
            )
