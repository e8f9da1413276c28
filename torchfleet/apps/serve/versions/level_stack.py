"""The writer's stack of levels: new levels on top, small ones merged at once, the largest one merged in a thread.

Levels are immutable, so a version in use keeps its levels. The number of levels stays logarithmic: a level is merged
with the next one unless the next one is more than twice as large. When the levels above the largest one hold a
quarter of its rows, all of them are merged into a new largest one, while new levels go on top.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from torchfleet.apps.serve.versions.level_file import Level, LevelWriter, MappedLevel, TableMap

MERGED_SHARE = 0.25  # all levels are merged when those above the largest one hold this share of its rows
SMALL = 1 << 16  # rows; a stack of fewer is merged at once


class LevelStack:
    """Levels, newest first. Belongs to one thread. Raises OSError if a level cannot be written; nothing has changed."""

    def __init__(self, folder: Path, first_file: int = 1, keeps_gone: bool = False) -> None:
        """`keeps_gone`: older rows are elsewhere, not in this stack, so that removed keys must always be kept."""
        self._folder, self._numbers = folder, itertools.count(first_file)
        self._keeps_gone = keeps_gone
        self._levels: list[MappedLevel] = []
        self._pool = ThreadPoolExecutor(1, "merge")
        self._merging: Future[MappedLevel] | None = None
        self._num_frozen = 0  # how many of the oldest levels are being merged in the thread

    @property
    def levels(self) -> list[Level]:
        return [mapped.level for mapped in self._levels]

    @property
    def is_merging(self) -> bool:
        """Whether a merge may be writing a file that is not on the stack yet."""
        return self._merging is not None

    def writer(self) -> LevelWriter:
        """A new level to fill; `add` or `reset` puts it on the stack."""
        return LevelWriter(self._folder, self._new_file())

    def add(self, level: Level) -> None:
        """Put a level on top."""
        self._levels.insert(0, MappedLevel(self._folder, level))
        self.settle()

    def reset(self, levels: Sequence[Level]) -> None:
        """Replace the whole stack by these levels, newest first."""
        self._abandon()
        self._levels = [MappedLevel(self._folder, level) for level in levels]

    def settle(self) -> bool:
        """Merge the levels that are due. Returns whether the list of levels has changed; the contents of tables stay
        the same.
        """
        is_changed = self._take_merged()
        if not self._levels:
            return is_changed
        while (num := self._num_to_merge()) > 1:
            merged = self._merged(self._levels[:num], num == len(self._levels) and not self._keeps_gone)
            self._levels[:num] = [merged]
            is_changed = True
        above = sum(mapped.level.num_rows for mapped in self._levels[:-1])
        if self._merging is None and above > max(SMALL, MERGED_SHARE * self._levels[-1].level.num_rows):
            self._num_frozen = len(self._levels)
            self._merging = self._pool.submit(self._merged, list(self._levels), not self._keeps_gone)
        return is_changed

    def close(self) -> None:
        """Wait for a merge that is under way."""
        self._abandon()
        self._pool.shutdown()

    def _num_to_merge(self) -> int:
        """How many of the newest levels become one."""
        sizes = [mapped.level.num_rows for mapped in self._levels[: len(self._levels) - self._num_frozen]]
        if not self._num_frozen and sum(sizes) <= SMALL:
            return len(sizes) if len(sizes) > 8 else 1
        num, total = 1, sizes[0] if sizes else 0
        for size in sizes[1 : len(sizes) if self._num_frozen else -1]:
            if size > 2 * total:
                break
            num, total = num + 1, total + size
        return num

    def _take_merged(self) -> bool:
        if self._merging is None or not self._merging.done():
            return False
        merging, num = self._merging, self._num_frozen
        self._merging, self._num_frozen = None, 0
        self._levels[-num:] = [merging.result()]
        return True

    def _abandon(self) -> None:
        if self._merging is not None:
            self._merging.exception()  # waits; no version names its file, so remove_unused removes it
        self._merging, self._num_frozen = None, 0

    def _merged(self, levels: Sequence[MappedLevel], is_whole: bool) -> MappedLevel:
        """One level with the contents of these. `is_whole`: no level is below them, so removed keys are left out."""
        names = {name: made.table.dim for mapped in reversed(levels) for name, made in mapped.tables.items()}
        with self.writer() as writer:
            for name, dim in names.items():
                maps = [mapped.tables[name] for mapped in levels if name in mapped.tables]
                most = sum(made.table.num_alive if is_whole else made.table.num_rows for made in maps)
                with writer.table(name, dim, most) as table:
                    _each_newest(maps, False, table.add)
                    if not is_whole:
                        _each_newest(maps, True, lambda keys, _, add=table.add_gone: add(keys))
            return MappedLevel(self._folder, writer.finish())

    def _new_file(self) -> str:
        return f"level-{next(self._numbers):09}"


def _each_newest(maps: Sequence[TableMap], of_gone: bool, take: Callable[..., None]) -> None:
    """Call `take` with the rows, or the removed keys, of each map that no newer map has, from the oldest map on."""
    for at in range(len(maps) - 1, -1, -1):
        table = maps[at].table
        first, last = (table.num_alive, table.num_rows) if of_gone else (0, table.num_alive)
        for keys, values in maps[at].chunks(first, last):
            is_newest = np.ones(len(keys), np.bool_)
            for newer in maps[:at]:
                is_newest &= newer.find(keys) < 0
            take(keys[is_newest], values[is_newest])
