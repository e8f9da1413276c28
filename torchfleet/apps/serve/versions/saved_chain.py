"""Follows the chain of saves in a folder or object store: the save that was applied last, and the saves since then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from torchfleet.apps.serve.versions.level_file import Level
from torchfleet.apps.serve.versions.level_stack import LevelStack
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.manifest import FILE, Link, Manifest, Parameter, Part, Table, read_manifest
from torchfleet.ps.checkpoint.narrow_arrays import widened
from torchfleet.ps.checkpoint.part_reader import read_dense, read_parts
from torchfleet.ps.checkpoint.save_files import read_model, serving_of, undescribed
from torchfleet.ps.kernels.rows import all_finite
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.settings.spec import Floats

_NOT_WRITTEN = "it is missing. A job writes it with each save, once its worker 0 has called the model: save it again"


@dataclass(frozen=True)
class News:
    """Saves that are to be applied, in order."""

    manifest: Manifest
    links: Sequence[Link]
    is_whole: bool  # the first is a full save, which replaces everything
    created: float
    gap: str = ""  # why the chain that was followed does not lead here


class SavedChain:
    """Follows the manifest of a folder. `taken` is the last save that was applied."""

    def __init__(self, folder: str, base: str = "", base_time: float = 0.0) -> None:
        """`base`: a save whose rows are elsewhere, and not read; the chain must contain it, with this time."""
        self._base, self._base_time = base, base_time
        self.storage = Storage(folder)
        self.taken: Link | None = None
        self._seen: object = None  # `_mark` of the manifest that was read last
        self._seen_alone: object = None  # the same of `newest_model`

    def news(self) -> News | None:
        """What was saved since the last call, or is left to be applied; None if there is nothing.

        Raises CheckpointError if there is no complete manifest.
        """
        mark = self._mark()
        if mark is not None and mark == self._seen:
            return None
        manifest = read_manifest(self.storage)
        self._seen = mark
        links = manifest.links()
        # a time that the job has set says nothing about the age of the model
        created = time.time() if manifest.is_time_set else manifest.time
        if self.taken is None:
            return News(manifest, links[self._start(links) :], True, created)
        at = next((i for i, link in enumerate(links) if _is_same(link, self.taken)), None)
        if at is None:
            return News(manifest, links[self._start(links) :], True, created, self._gap(links))
        return News(manifest, links[at + 1 :], False, created) if links[at + 1 :] else None

    def look_again(self) -> None:
        """Read the manifest again at the next call of `news`, even if it has not changed."""
        self._seen = None

    @property
    def is_replaced(self) -> bool:
        """Whether the manifest was replaced since `news` read it."""
        return self._mark() != self._seen

    def write(self, news: News, link: Link, stack: LevelStack) -> Level:
        """The rows of a save as a level. Raises CheckpointError if a file is missing, incomplete or damaged."""
        with stack.writer() as writer:
            for saved in news.manifest.tables:
                if saved.is_dense:
                    continue
                if link.save == self._base:
                    continue
                rows, gone = link.parts_of(saved.name), link.parts_of(saved.name, "gone") if link.parent else []
                num = sum(part.rows for part in (*rows, *gone))
                with writer.table(saved.name, saved.dim, num) as table:
                    for keys, values in read_parts(self.storage, link.save, rows, _rows_of(saved)):
                        table.add(keys, values)
                    for keys, _ in read_parts(self.storage, link.save, gone, _rows_of(saved)):
                        table.add_gone(keys)
            return writer.finish()

    def network(self, news: News, link: Link) -> Floats:
        """The values of all dense tables at a save, one table behind the other, as `layout` says."""
        manifest = msgspec.structs.replace(news.manifest, save=link.save, parts=link.parts)
        blocks = [read_dense(self.storage, manifest, table)[0] for table in dense_tables(manifest)]
        return np.concatenate([np.empty(0, np.float32), *blocks])

    def model(self, link: Link) -> bytes:
        """The serving.json of a save. Raises CheckpointError if the save was replaced meanwhile."""
        found = serving_of(self.storage, link.save)
        if self.is_replaced:  # the file beside the manifest may be the new save's
            raise CheckpointError(f"{self.storage.place(link.save)} was replaced while it was read")
        return undescribed(_NOT_WRITTEN) if found is None else found

    def newest_model(self) -> bytes | None:
        """The serving.json of the newest save, for who reads rows elsewhere; None if no save was made since the last
        call that returned one. Raises CheckpointError if it cannot be read.
        """
        mark = self._mark()
        if mark is None or mark == self._seen_alone:
            return None
        _, found = read_model(self.storage)
        self._seen_alone = mark
        return undescribed(_NOT_WRITTEN) if found is None else found

    def _start(self, links: Sequence[Link]) -> int:
        """The place of the first save to apply. Raises CheckpointError if the chain does not contain the base."""
        if not self._base:
            return 0
        wanted = self._base, self._base_time
        found = next((i for i, link in enumerate(links) if (link.save, link.time) == wanted), None)
        if found is None:
            raise CheckpointError(
                f"the read-only servers hold {self._base}, and the chain in {self.storage.path} does not contain it: "
                f"it begins with {links[0].save} of time {links[0].time:.3f}, theirs is of {self._base_time:.3f}. "
                "Start the servers from the newest save, then `fleet serve`"
            )
        return found

    def _gap(self, links: Sequence[Link]) -> str:
        assert self.taken is not None
        if links[0].number > self.taken.number and len(links) == 1:
            return ""  # another full save: nothing is missing
        return (
            f"save {self.taken.number} was applied last, and the chain in {self.storage.path} does not contain it: it "
            f"begins with save {links[0].number}. All of it is read."
        )

    def _mark(self) -> object:
        """A value that changes when the manifest is replaced; None if there is no manifest."""
        if not self.storage.is_local:
            return self.storage.read(FILE) if self.storage.exists(FILE) else None
        try:
            found = os.stat(self.storage.place(FILE))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def dense_tables(manifest: Manifest) -> list[Table]:
    return [table for table in manifest.tables if table.is_dense]


def layout(tables: Sequence[Table]) -> list[Parameter]:
    """The parameters of these dense tables, with their places in all their blocks, one behind the other."""
    found, start = [], 0
    for table in tables:
        found += [msgspec.structs.replace(own, start=own.start + start) for own in table.parameters]
        start += table.size
    return found


def _is_same(link: Link, taken: Link) -> bool:
    """Whether both hold the same model: the same save, or its compaction, which keeps number and time."""
    return (link.number, link.time) == (taken.number, taken.time) and (link.save == taken.save or not link.parent)


def _rows_of(saved: Table) -> Callable[[Part, part_file.Arrays], tuple[Keys, Floats]]:
    def prepare(part: Part, arrays: part_file.Arrays) -> tuple[Keys, Floats]:
        part_file.check_arrays(saved, part, arrays)
        keys = np.array(arrays["keys"])  # in memory of its own: the kernels take no read-only arrays
        if part.kind != "rows":
            return keys, np.empty((0, saved.dim), np.float32)
        values = np.array(widened(arrays)["rows"][:, : saved.dim])
        if not all_finite(values.reshape(-1).view(np.uint32)):
            raise CheckpointError(f"NaN or infinity in rows of table '{saved.name}'")
        return keys, values

    return prepare
