"""The rows of a chain of saves: every live row exactly once, from the newest save that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Link, Manifest, Part, Table
from torchfleet.ps.checkpoint.narrow_arrays import widened
from torchfleet.ps.checkpoint.part_file import STATISTICS, Arrays, check_arrays
from torchfleet.ps.checkpoint.part_reader import read_parts
from torchfleet.ps.checkpoint.repeated_keys import RepeatedKeys
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys
from torchfleet.ps.tables.rows.row_statistics import row_columns
from torchfleet.ps.tables.table import PartKind

_CHUNK = 1 << 12  # keys at a time: the best size for a map

Choose = Callable[[Keys], npt.NDArray[np.bool_]]
Mask = npt.NDArray[np.bool_]


def statistics_of(manifest: Manifest, table: str) -> tuple[str, ...]:
    """The statistics of a saved table: those that its policies read; empty if it was saved for prediction."""
    saved = manifest.table(table)
    kept = row_columns(saved.spec()) if not saved.is_dense and manifest.kind == "full" else ()
    return tuple(name for name in STATISTICS if name in kept)


def live_rows(
    storage: Storage, manifest: Manifest, table: str, choose: Choose | None = None
) -> Iterator[tuple[Keys, Arrays]]:
    """Like `saved_rows`, but with narrow rows as float32 `rows`."""
    return ((keys, widened(arrays)) for keys, arrays in saved_rows(storage, manifest, table, choose))


def saved_rows(
    storage: Storage, manifest: Manifest, table: str, choose: Choose | None = None
) -> Iterator[tuple[Keys, Arrays]]:
    """All rows of a sparse table, each exactly once: keys, with `rows` (or the arrays of narrow rows) and statistics,
    one file at a time.

    `choose` returns which keys are wanted. Arrays may be read-only; some are empty. Memory: a few files, and 20 to 30
    bytes per wanted key of the table, or only of one server's if all saves were made by the same number of servers.
    """
    saved = manifest.table(table)
    if saved.is_dense:
        names = ", ".join(known.name for known in manifest.tables if not known.is_dense)
        raise CheckpointError(f"'{table}' is dense: it has no rows to export or look into. Sparse: {names or 'none'}.")
    return _live(storage, manifest, saved, "rows", "gone", choose)


def live_candidates(
    storage: Storage, manifest: Manifest, table: str, choose: Choose | None = None
) -> Iterator[tuple[Keys, Arrays]]:
    """All candidates (keys that were seen and have no row), each exactly once, with their statistics; as
    `live_rows`.
    """
    return _live(storage, manifest, manifest.table(table), "candidates", "candidates_gone", choose)


class KeySet:
    """A set of the keys seen so far."""

    def __init__(self, max_keys: int, num_expected: int) -> None:
        self._map = KeyMap(0, 4 * KEY_WORDS * (max_keys + 1))
        self._map.reserve_at_once(min(num_expected, self._map.num_free_rows))
        self._found = np.empty(_CHUNK, np.int64)

    def add(self, keys: Keys) -> Mask:
        """Add keys; returns a mask of the keys that are new. Of equal keys, only the last one counts as new."""
        is_new = np.zeros(len(keys), np.bool_)
        for stop in range(len(keys), 0, -_CHUNK):
            chunk = keys[max(0, stop - _CHUNK) : stop][::-1].copy()
            if self._map.num_free_rows < len(chunk):
                raise CheckpointError("more than four billion keys in one table: use more servers")
            at = self._found[: len(chunk)]
            if self._map.find(chunk, at, 0):
                is_new[stop - 1 - self._map.insert_missing(chunk, at)] = True
        return is_new


def _live(
    storage: Storage, manifest: Manifest, saved: Table, kind: PartKind, gone: PartKind, choose: Choose | None
) -> Iterator[tuple[Keys, Arrays]]:
    links = manifest.links()[::-1]
    if len({link.num_servers for link in links}) > 1:
        yield from _live_of(storage, saved, links, kind, gone, choose)
        return
    shards = {part.shard for link in links for part in link.parts_of(saved.name, kind)}
    for shard in sorted(shards):  # a key has the same owner in all links, so shards can be processed one by one
        own = [_share(link, shard) for link in links]
        yield from _live_of(storage, saved, own, kind, gone, choose)


def _share(link: Link, shard: int) -> Link:
    own = [part for part in link.parts if part.shard == shard]
    return Link(link.save, link.number, link.parent, link.num_servers, own, link.time)


def _live_of(
    storage: Storage, saved: Table, links: Sequence[Link], kind: PartKind, gone: PartKind, choose: Choose | None
) -> Iterator[tuple[Keys, Arrays]]:
    """`links`: newest first. Rows and deletions of a newer save hide the rows of older ones."""
    counts = [sum(part.rows for part in link.parts_of(saved.name, kind)) for link in links]
    num_gone = sum(part.rows for link in links for part in link.parts_of(saved.name, gone))
    met = KeySet(sum(counts) + num_gone, 0 if choose else max(counts, default=0))

    def prepare(part: Part, arrays: Arrays) -> tuple[Keys, Arrays, Part]:
        return (*_chosen(_checked(saved, part, arrays), choose), part)

    for link in links:
        repeated = RepeatedKeys(storage, link.save)
        # From the end: if a row was dropped and created again during one save, the later one counts.
        for keys, arrays, part in read_parts(storage, link.save, link.parts_of(saved.name, kind)[::-1], prepare):
            repeated.add(part, keys.copy())  # the caller may change the keys
            yield _where(met.add(keys), keys, arrays)
        repeated.check()
        if link is not links[-1]:
            for keys, _, _ in read_parts(storage, link.save, link.parts_of(saved.name, gone), prepare):
                met.add(keys)


def _chosen(found: tuple[Keys, Arrays], choose: Choose | None) -> tuple[Keys, Arrays]:
    return found if choose is None else _where(choose(found[0]), *found)


def _where(mask: Mask, keys: Keys, arrays: Arrays) -> tuple[Keys, Arrays]:
    if mask.all():
        return keys, arrays
    return keys[mask], {name: array[mask] for name, array in arrays.items()}


def _checked(saved: Table, part: Part, arrays: Arrays) -> tuple[Keys, Arrays]:
    """Keys in new memory, and the arrays beside them."""
    check_arrays(saved, part, arrays)
    rest = dict(arrays)
    return np.array(rest.pop("keys")), rest
