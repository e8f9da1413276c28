"""Rows of two saved models, matched by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.chain import Choose, live_candidates, live_rows, statistics_of
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.checkpoint.part_file import Arrays
from torchfleet.ps.tables.rows.keymap import KeyMap, Keys
from torchfleet.ps.tables.rows.row_statistics import candidate_columns, join_columns
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.tables.table import PartKind

_CHUNK = 1 << 12
_MAP_BYTES = 24  # per key, beside its row

Show = Callable[[str], None]
Words = npt.NDArray[np.uint32]


class Difference(msgspec.Struct):
    """Differences of rows, of candidates, or of the elements of a dense parameter, compared bit by bit."""

    only_in_a: int = 0
    only_in_b: int = 0
    equal: int = 0  # in both, with the same values
    changed: int = 0
    largest: float = 0.0  # largest difference between two values
    largest_at: int | None = None  # its key (signed, as in exports), or its position in the parameter
    mean: float = 0.0  # mean of the absolute differences, over all values that both have
    others: dict[str, int] = {}  # "state", or the name of a statistic: the number of common rows in which it differs

    @property
    def is_none(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.changed or self.others)


class Rows:
    """The rows, or the candidates, of a saved table."""

    def __init__(self, storage: Storage, manifest: Manifest, table: str, of_candidates: bool) -> None:
        self._live = live_candidates if of_candidates else live_rows
        self._place = storage, manifest, table
        saved, spec = manifest.table(table), manifest.table(table).spec()
        self.dim = 0 if of_candidates else saved.dim
        self.num_words = 0 if of_candidates else saved.num_words
        self.names = candidate_columns(spec) if of_candidates else statistics_of(manifest, table)
        kind: PartKind = "candidates" if of_candidates else "rows"
        self.most = sum(part.rows for link in manifest.links() for part in link.parts_of(table, kind))

    def blocks(self, choose: Choose | None, names: tuple[str, ...]) -> Iterator[tuple[Keys, Words]]:
        """Yield up to _CHUNK rows at a time: keys; and values, state and the statistics `names` side by side."""
        for keys, arrays in self._live(*self._place, choose):
            for start in range(0, len(keys), _CHUNK):
                some = slice(start, start + _CHUNK)
                yield keys[some], self._block({name: array[some] for name, array in arrays.items()}, names, keys[some])

    def _block(self, arrays: Arrays, names: tuple[str, ...], keys: Keys) -> Words:
        """A statistic that was not saved is zero, as after a load."""
        statistics = join_columns(names, arrays, len(keys)).view(np.uint32)
        return np.concatenate([arrays["rows"].view(np.uint32), statistics], axis=1) if self.num_words else statistics


class Known:
    """Rows in memory, by key."""

    def __init__(self, num_words: int, most: int) -> None:
        num_words = max(num_words, 1)
        self._map = KeyMap(num_words, 4 * (KeyMap.offset + num_words) * (most + 1))
        words = self._map.store.view(np.uint32)
        self._words: Words = words[: len(words) // self._map.width * self._map.width].reshape(-1, self._map.width)
        self.num = 0

    def add(self, keys: Keys, block: Words) -> None:
        at = self._find(keys)
        if self._map.num_free_rows < len(keys):
            raise CheckpointError("more than four billion rows in memory: give a smaller max_bytes")
        self._map.insert_missing(keys, at)
        self._words[at, KeyMap.offset : KeyMap.offset + block.shape[1]] = block
        self.num += len(keys)

    def take(self, keys: Keys, num_words: int) -> tuple[npt.NDArray[np.bool_], Words]:
        """(mask of the keys that are known, their rows)."""
        at = self._find(keys)
        return at >= 0, self._words[at[at >= 0], KeyMap.offset : KeyMap.offset + num_words]

    def _find(self, keys: Keys) -> npt.NDArray[np.int64]:
        at = np.empty(len(keys), np.int64)
        self._map.find(keys, at, 0)
        return at


def match(a: Rows, b: Rows, max_bytes: int, show: Show) -> Difference:
    """How the rows of `a` differ from the rows of `b`. Both must have the same `dim`.

    The rows of `a` are held in memory. If they would take more than `max_bytes`, a share of the keys is compared at a
    time, and both models are read again for the next share.
    """
    tally = Tally(a, b)
    num_rounds = 1 + a.most * (_MAP_BYTES + 4 * (a.num_words + len(tally.names))) // max_bytes
    for number in range(num_rounds):
        choose = _share(number, num_rounds) if num_rounds > 1 else None
        known = Known(a.num_words + len(tally.names), a.most)
        for keys, block in a.blocks(choose, tally.names):
            known.add(keys, block)
            show(f"{known.num:,} of A")
        num_in_both = num = 0
        for keys, block in b.blocks(choose, tally.names):
            is_known, others = known.take(keys, a.num_words + len(tally.names))
            tally.add(keys[is_known], others, block[is_known])
            num_in_both += len(others)
            num += len(keys)
            show(f"{num:,} of B")
        tally.found.only_in_a += known.num - num_in_both
        tally.found.only_in_b += num - num_in_both
    return tally.result()


def _share(number: int, num_shares: int) -> Choose:
    spec = TableSpec("any")  # by hash, also for ids that servers own round-robin
    return lambda keys: owners_of(spec, keys, num_shares) == number


class Tally:
    """Accumulates the differences of rows that both models have."""

    def __init__(self, a: Rows, b: Rows) -> None:
        self._a, self._b, self._dim = a, b, a.dim
        self.names = tuple(name for name in a.names if name in b.names)
        self.found = Difference(others={})
        self._sum = 0.0

    def add(self, keys: Keys, a: Words, b: Words) -> None:
        found, dim = self.found, self._dim
        width = min(self._a.num_words, self._b.num_words)
        self._note("state", a[:, dim:width] != b[:, dim:width])
        for i, name in enumerate(self.names):
            self._note(name, a[:, [self._a.num_words + i]] != b[:, [self._b.num_words + i]])
        differs = (a[:, :dim] != b[:, :dim]).any(axis=1)
        num = int(differs.sum())
        found.changed += num
        found.equal += len(keys) - num
        if num:
            apart = _apart(a[differs, :dim], b[differs, :dim])
            self._sum += float(apart.sum())
            largest = apart.max(axis=1)
            most = int(largest.argmax())
            if found.largest_at is None or largest[most] > found.largest:
                found.largest = float(largest[most])
                found.largest_at = int(keys[differs][most : most + 1].view(np.int64)[0])

    def result(self) -> Difference:
        num_values = (self.found.equal + self.found.changed) * self._dim
        self.found.mean = self._sum / num_values if num_values else 0.0
        return self.found

    def _note(self, name: str, differs: npt.NDArray[np.bool_]) -> None:
        num = int(differs.any(axis=1).sum())
        if num:
            self.found.others[name] = self.found.others.get(name, 0) + num


def compare_elements(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Difference:
    """Compare a dense parameter: one row of values, and one for each kind of state."""
    x, y = np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32)
    apart, changed = _apart(x[:1], y[:1]), int((x[0] != y[0]).sum())
    found = Difference(equal=x.shape[1] - changed, changed=changed, others={})
    if changed:
        found.largest, found.largest_at, found.mean = float(apart.max()), int(apart.argmax()), float(apart.mean())
    num_lines = min(len(x), len(y))  # one may have been saved without state
    if num := int((x[1:num_lines] != y[1:num_lines]).any(axis=0).sum()):
        found.others["state"] = num
    return found


def _apart(a: Words, b: Words) -> npt.NDArray[np.float64]:
    apart: npt.NDArray[np.float64] = np.abs(_floats(a) - _floats(b))
    return apart


def _floats(words: Words) -> npt.NDArray[np.float64]:
    return np.ascontiguousarray(words).view(np.float32).astype(np.float64)
