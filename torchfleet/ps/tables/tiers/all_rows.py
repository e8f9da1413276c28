"""All rows of a table on two tiers, from memory and disk, while rows move between the two (passes.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.statistics import NEVER
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.cold_search import look_up
from torchfleet.ps.tables.tiers.directory import Directory
from torchfleet.ps.tables.tiers.hot_rows import HotRows
from torchfleet.ps.tables.tiers.pages import RECORD_HEAD, Words, keys_of
from torchfleet.ps.tables.tiers.passes import MOST_PASSES, Pass, Passes
from torchfleet.ps.tables.tiers.scan import Scan

WALKED = 1024  # rows of a walk at once: each is a read of the disk
CLEARED = 1 << 20  # rows in memory that a pass prepares at once


class AllRows:
    """The rows of one table, as (keys, words) in slices."""

    def __init__(self, name: str, hot: HotRows, cold: ColdRows, directory: Directory, passes: Passes) -> None:
        self._name, self._hot, self._cold, self._directory, self._passes = name, hot, cold, directory, passes
        self._index = hot.index

    def slices(self, num_rows: int, since: int, most_wait: float | None = None) -> Iterator[tuple[Keys, Words]]:
        """Yield (keys, words) of all rows that changed in interval `since` or later, in slices. `most_wait`: seconds
        after which a slice without rows comes if the disk is busy.
        """
        lane = self._passes.reserve()
        if lane is None:
            raise TableError(
                f"{MOST_PASSES} passes over table '{self._name}' (saves, copies, shrinks) are running already, the "
                "most at once; try again when one has ended"
            )
        try:
            for start in range(0, self._index.num_row_numbers, CLEARED):
                self._passes.clear(lane, slice(start, start + CLEARED))
                if most_wait is not None:
                    yield np.empty(0, np.uint64), np.empty((0, self._cold.layout.row_words), np.uint32)
            one = self._passes.begin(lane, self._cold.next_ordinal)
            yield from self._scan(one, since, most_wait)
            yield from self._hot_rows(one, num_rows, since)
            one.until, one.is_last_scan = self._cold.next_ordinal, True
            yield from self._scan(one, since, most_wait)
            while one.late:
                keys = np.concatenate(one.late)
                one.late = [keys[num_rows:]] if len(keys) > num_rows else []
                yield self._read(keys[:num_rows])
        finally:
            self._passes.end(lane)

    def _scan(self, one: Pass, since: int, most_wait: float | None) -> Iterator[tuple[Keys, Words]]:
        with Scan(self._cold, since, one.begun_at, int(one.bit), most_wait) as scan:
            while one.cold < one.until:
                before = one.cold
                _, keys, words, one.cold = scan.take(before)
                if len(keys) or one.cold == before:
                    yield keys, words

    def _hot_rows(self, one: Pass, num_rows: int, since: int) -> Iterator[tuple[Keys, Words]]:
        while one.hot < self._index.num_row_numbers:
            stop = min(one.hot + num_rows, self._index.num_row_numbers)
            rows = np.arange(one.hot, stop)
            rows = rows[(self._hot.used[one.hot : stop] != NEVER) & (self._hot.changed[one.hot : stop] >= since)]
            rows = self._passes.take_hot(one, rows)
            one.hot = stop
            if len(rows):
                yield self._index.keys_of(rows), self._hot.gather(rows)

    def _read(self, keys: Keys) -> tuple[Keys, Words]:
        """The rows of these keys, wherever they are; keys without a row are left out."""
        at = self._hot.find(keys, 0)
        places, records = look_up(self._directory, self._cold, keys[at < 0])
        there = np.flatnonzero(at < 0)[places >= 0]
        words = np.concatenate([self._hot.gather(at[at >= 0]), records[:, RECORD_HEAD:]])
        return np.concatenate([keys[at >= 0], keys[there]]), words

    def walk(self, cursor: int, num_rows: int) -> tuple[Keys, Words, int]:
        """(keys, words, next cursor) of at most `num_rows` rows, more only if that many have the same tag; 0 is the
        first and the last cursor. Each slice is sorted by place, so that it tells nothing about the hashes of its keys.
        """
        first = self._directory.first_cold
        places, behind = self._directory.places_from(cursor, min(num_rows, WALKED))
        hot = np.sort(places[places < first])
        records = self._cold.read(np.sort(places[places >= first]) - first)
        keys = np.concatenate([self._index.keys_of(hot), keys_of(records)])
        return keys, np.concatenate([self._hot.gather(hot), records[:, RECORD_HEAD:]]), behind
