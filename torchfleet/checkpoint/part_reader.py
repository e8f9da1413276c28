"""Reading part files into tables: every byte is checked, and every row goes to the shard that owns it now."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchfleet.checkpoint import part_file
from torchfleet.checkpoint.manifest import Link, Manifest, Parameter, Part, Table
from torchfleet.checkpoint.saved_parameters import check_parameter, without_lost
from torchfleet.errors import CheckpointError
from torchfleet.storage import Storage
from torchfleet.tables.settings.owners import owners_of
from torchfleet.tables.settings.spec import TableSpec, shard_range
from torchfleet.tables.table import BlockTable, PartKind, RowTable, SavedSlice

Made = TypeVar("Made")

_AHEAD = 3  # files being read while another one is taken in


def read_part(storage: Storage, folder: str, part: Part) -> part_file.Arrays:
    """The part's arrays. A file that is missing, cut off or changed by a single bit is named."""
    name = f"{folder}/{part.file}"
    data = storage.read(name)
    place = storage.place(name)
    if len(data) != part.bytes:
        raise CheckpointError(f"{place} is damaged: {len(data):,} bytes, and {part.bytes:,} were saved")
    if part_file.checksum([data]) != part.crc32:
        raise CheckpointError(f"{place} is damaged: its checksum is not the one that was saved")
    return part_file.decode(data, place)


def read_parts(
    storage: Storage, folder: str, chosen: Sequence[Part], prepare: Callable[[Part, part_file.Arrays], Made]
) -> Iterator[Made]:
    """What `prepare` makes of each part, in turn; the next ones are read and prepared meanwhile, in threads."""

    def read(part: Part) -> Made:
        return prepare(part, read_part(storage, folder, part))

    with ThreadPoolExecutor(_AHEAD) as pool:
        under_way = deque(pool.submit(read, part) for part in chosen[:_AHEAD])
        for following in range(_AHEAD, len(chosen) + _AHEAD):
            if not under_way:
                return
            made = under_way.popleft().result()
            if following < len(chosen):
                under_way.append(pool.submit(read, chosen[following]))
            yield made


def load_sparse(storage: Storage, manifest: Manifest, table: RowTable, quiet: bool = False) -> int:
    """All saved rows that this shard of the table owns, with their state if the rule is the same. Returns how many.

    `quiet`: nothing is printed if the state is not loaded.
    """
    spec, saved = table.spec, manifest.table(table.spec.name)
    check_match(saved, spec)
    is_whole = spec.dim * (1 + saved.num_states) == table.num_words and _same_rule(saved, spec)
    if not is_whole and not quiet:
        _tell_of_new_state(saved, spec)
    table.step = saved.step if is_whole else 0
    for link in manifest.links():
        loading = Loading(storage, link, table, saved, is_whole)
        loading.rows()
        loading.candidates()
    loading.sketch()
    return table.note_loaded()


class Loading:
    """One save of a chain into one shard of a table."""

    def __init__(self, storage: Storage, link: Link, table: RowTable, saved: Table, is_whole: bool) -> None:
        self._storage, self._link, self._table, self._saved, self._is_whole = storage, link, table, saved, is_whole
        self._same_cut = link.num_servers == table.spec.num_shards

    def rows(self) -> None:
        """Rows that were dropped, then those that are there."""
        self._load("gone")
        table = self._table
        share = 1 if self._same_cut else table.spec.num_shards
        table.reserve(sum(part.rows for part in self._parts("rows")) // share)
        self._load("rows")

    def candidates(self) -> None:
        """Keys that were counted and had no row."""
        self._load("candidates_gone")
        self._load("candidates")

    def sketch(self) -> None:
        """Counters of the window; of another window they would say nothing."""
        entry, saved = self._table.spec.entry, self._saved.spec().entry
        if (saved.window_hours, saved.num_blocks) != (entry.window_hours, entry.num_blocks):
            return
        for part, arrays in read_parts(self._storage, self._link.save, self._parts("sketch"), lambda *both: both):
            self._table.load_slice(SavedSlice("sketch", arrays, part.start))

    def _load(self, kind: PartKind) -> None:
        """Everything of this kind that the shard owns."""
        for arrays in read_parts(self._storage, self._link.save, self._parts(kind), self._checked):
            self._table.load_slice(SavedSlice(kind, arrays))

    def _parts(self, kind: PartKind) -> list[Part]:
        """The files that hold something of this shard."""
        chosen = self._link.parts_of(self._table.spec.name, kind)
        is_own = self._same_cut and kind != "sketch"
        return [part for part in chosen if part.shard == self._table.spec.shard] if is_own else chosen

    def _checked(self, part: Part, arrays: part_file.Arrays) -> part_file.Arrays:
        spec = self._table.spec
        found = {name: array.reshape(-1) if name != "rows" else array for name, array in arrays.items()}
        keys = found["keys"]
        if keys.dtype != np.uint64 or any(len(array) != len(keys) for array in found.values()):
            raise CheckpointError(f"{part.file}: its arrays do not have one value for each of {len(keys)} keys")
        mine = None if self._same_cut else owners_of(spec, keys, spec.num_shards) == spec.shard
        if mine is not None:
            found = {name: array[mine] for name, array in found.items()}
        if part.kind == "rows":
            if found["rows"].shape[1:] != (spec.dim * (1 + self._saved.num_states),):
                shape = arrays["rows"].shape
                raise CheckpointError(f"{part.file}: rows of shape {shape} do not fit table '{spec.name}'")
            width = self._table.num_words if self._is_whole else spec.dim
            found["rows"] = np.ascontiguousarray(found["rows"][:, :width])
            self._table.check_values(found["keys"], found["rows"])
            if not self._is_whole:
                found.pop("tick", None)  # steps are counted anew
        return found


def load_dense(
    storage: Storage,
    manifest: Manifest,
    table: BlockTable,
    names: set[str] | None,
    layout: Sequence[Parameter] | None = None,
) -> int:
    """Values of this shard's elements: of the named parameters, or of all. Returns how many elements.

    `layout` says where the model has its parameters; each gets the values that were saved under its name. State, which
    has one count of steps for the table, comes with them if all of them come from one table of the same rule.
    """
    spec = table.spec
    if layout is None:
        check_match(manifest.table(spec.name), spec)
        layout = manifest.table(spec.name).parameters
    chosen = [parameter for parameter in layout if names is None or parameter.name in names]
    if not chosen:
        return 0
    known = {parameter.name: (saved, parameter) for saved in manifest.tables for parameter in saved.parameters}
    chosen = without_lost(storage, manifest, chosen)
    if not chosen:
        return 0
    for parameter in chosen:
        check_parameter(storage, parameter, known[parameter.name][1] if parameter.name in known else None)
    sources = {known[parameter.name][0].name: known[parameter.name][0] for parameter in chosen}
    blocks = {name: read_dense(storage, manifest, saved) for name, saved in sources.items()}
    saved = known[chosen[0].name][0]
    is_whole = len(chosen) == len(layout) and len(sources) == 1 and _same_rule(saved, spec)
    is_whole = is_whole and saved.num_states == table.num_states
    if not is_whole and names is None:
        _tell_of_new_state(saved, spec)
    first, last = shard_range(spec.size, spec.shard, spec.num_shards)
    loaded = []
    for parameter in chosen:
        source, there = known[parameter.name]
        start = max(first, parameter.start)
        stop = min(last, parameter.start + parameter.size)
        if start < stop:
            shift = there.start - parameter.start
            block = blocks[source.name][: None if is_whole else 1, start + shift : stop + shift]
            table.load(start - first, block)
            loaded.append((start, stop))
    table.loaded = loaded
    table.step = saved.step if is_whole else 0
    return sum(stop - start for start, stop in loaded)


def _tell_of_new_state(saved: Table, spec: TableSpec) -> None:
    """Tables that are not trained (in a prediction job, of fixed parameters) have none to tell of."""
    if not spec.rule.lr or spec.name != saved.name:
        return
    print(
        f"table '{spec.name}': saved by {saved.rule['name']} with {saved.num_states} numbers of state per value, and "
        f"now trained by {spec.rule.name}: values are loaded, the optimizer's state starts anew",
        file=sys.stderr,
        flush=True,
    )


def read_dense(storage: Storage, manifest: Manifest, saved: Table) -> npt.NDArray[np.float32]:
    """A dense table put together from its part files: a row of values, and one for each number of state."""
    whole = np.empty((1 + saved.num_states, saved.size), np.float32)
    num = 0
    for part, arrays in read_parts(storage, manifest.save, manifest.parts_of(saved.name), lambda *both: both):
        block = arrays["values"]
        if block.ndim != 2 or len(block) != len(whole) or part.start < 0 or part.start + block.shape[1] > saved.size:
            raise CheckpointError(f"{part.file}: a block of shape {block.shape} does not fit table '{saved.name}'")
        whole[:, part.start : part.start + block.shape[1]] = block
        num += block.shape[1]
    if num != saved.size:
        raise CheckpointError(f"table '{saved.name}': {num:,} of {saved.size:,} elements were saved")
    return whole


def check_match(saved: Table, spec: TableSpec) -> None:
    for name in ("kind", "dim", "size"):
        if getattr(saved, name) != getattr(spec, name):
            raise CheckpointError(
                f"table '{spec.name}' was saved with {name}={getattr(saved, name)}, and the model has "
                f"{name}={getattr(spec, name)}. Load it into the model that it was saved from."
            )


def _same_rule(saved: Table, spec: TableSpec) -> bool:
    return bool(saved.rule["name"] == spec.rule.name)
