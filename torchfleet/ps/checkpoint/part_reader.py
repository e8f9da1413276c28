"""Reads part files into tables: every byte is checked, and every row goes to the shard that owns it now."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError, FleetError, TableError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.manifest import FILE, Link, Manifest, Parameter, Part, Table
from torchfleet.ps.checkpoint.narrow_arrays import dtype_of, widened
from torchfleet.ps.checkpoint.repeated_keys import RepeatedKeys
from torchfleet.ps.checkpoint.saved_parameters import check_parameter
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec, shard_range
from torchfleet.ps.tables.table import BlockTable, PartKind, RowTable, SavedSlice

Made = TypeVar("Made")

_AHEAD = 3  # files to read ahead


def read_part(storage: Storage, folder: str, part: Part) -> part_file.Arrays:
    """The part's arrays. Raises CheckpointError, which names the file, if it is missing, truncated or changed by one
    bit.
    """
    name = f"{folder}/{part.file}"
    place = storage.place(name)
    storage.check_own(name)
    data = storage.read_buffer(name)
    if len(data) != part.bytes:
        raise CheckpointError(f"{place} is damaged: {len(data):,} bytes, and {part.bytes:,} were saved")
    if part_file.checksum([data]) != part.crc32:
        raise CheckpointError(f"{place} is damaged: its checksum is not the one that was saved")
    return part_file.decode(data, place)


def read_parts(
    storage: Storage, folder: str, chosen: Sequence[Part], prepare: Callable[[Part, part_file.Arrays], Made]
) -> Iterator[Made]:
    """Yield `prepare`'s result for each part, in order; threads read and prepare the next parts meanwhile.

    An exception of `prepare` becomes a CheckpointError that names the file.
    """

    def read(part: Part) -> Made:
        arrays = read_part(storage, folder, part)
        with _naming(storage.place(f"{folder}/{part.file}")):
            return prepare(part, arrays)

    with ThreadPoolExecutor(_AHEAD) as pool:
        under_way = deque(pool.submit(read, part) for part in chosen[:_AHEAD])
        for following in range(_AHEAD, len(chosen) + _AHEAD):
            if not under_way:
                return
            made = under_way.popleft().result()
            if following < len(chosen):
                under_way.append(pool.submit(read, chosen[following]))
            yield made


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """Turn errors in a file's contents into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{place}: {text}") from error


def load_sparse(storage: Storage, manifest: Manifest, table: RowTable, quiet: bool = False) -> int:
    """Load all saved rows that this shard of the table owns, with their state if the rule is the same. Returns the
    number of rows in the table.

    `quiet`: print nothing if the state is not loaded.
    """
    spec, saved = table.spec, manifest.table(table.spec.name)
    check_match(storage, saved, spec)
    is_whole = saved.num_words == table.num_words and _same_rule(saved, spec)
    if not is_whole and not quiet:
        _tell_of_new_state(saved, spec)
    if not quiet:
        _tell_of_rounding(saved, spec)
    table.step = saved.step if is_whole else 0
    for link in manifest.links():
        loading = Loading(storage, link, table, saved, is_whole)
        loading.rows()
        loading.candidates()
    loading.sketch()
    return table.note_loaded()


class Loading:
    """Loads one save of a chain into one shard of a table."""

    def __init__(self, storage: Storage, link: Link, table: RowTable, saved: Table, is_whole: bool) -> None:
        self._storage, self._link, self._table, self._saved, self._is_whole = storage, link, table, saved, is_whole
        self._same_cut = link.num_servers == table.spec.num_shards

    def rows(self) -> None:
        """Drop the rows that this save lists as deleted, then load its rows."""
        self._load("gone")
        table = self._table
        share = 1 if self._same_cut else table.spec.num_shards
        table.reserve(sum(part.rows for part in self._parts("rows")) // share)
        self._load("rows")

    def candidates(self) -> None:
        """Load the candidates: keys that were counted and had no row."""
        self._load("candidates_gone")
        self._load("candidates")

    def sketch(self) -> None:
        """Load the counters of the window. Counters of a different window have no meaning here, and are skipped."""
        entry, saved = self._table.spec.entry, self._saved.spec().entry
        if (saved.window_hours, saved.num_blocks) != (entry.window_hours, entry.num_blocks):
            return
        for part, arrays in read_parts(self._storage, self._link.save, self._parts("sketch"), self._whole):
            self._table.load_slice(SavedSlice("sketch", arrays, part.start))

    def _load(self, kind: PartKind) -> None:
        """Load everything of this kind that the shard owns."""
        repeated, before, num_keys = RepeatedKeys(self._storage, self._link.save), self._table.num_rows, 0
        is_first = kind == "rows" and not before
        for part, arrays in self._read(kind):
            num_keys += len(arrays["keys"])
            if not is_first:
                repeated.add(part, arrays["keys"])
            with _naming(self._storage.place(f"{self._link.save}/{part.file}")):
                self._table.load_slice(SavedSlice(kind, arrays))
        if self._table.num_rows == before + num_keys:  # every key has made a row: no key repeats
            return
        if is_first:  # read again: holding the keys of all rows would take a third more memory
            for part, arrays in self._read(kind):
                repeated.add(part, arrays["keys"])
        repeated.check()

    def _read(self, kind: PartKind) -> Iterator[tuple[Part, part_file.Arrays]]:
        return read_parts(self._storage, self._link.save, self._parts(kind), self._own)

    def _parts(self, kind: PartKind) -> list[Part]:
        """The files that can hold data of this shard."""
        chosen = self._link.parts_of(self._table.spec.name, kind)
        is_own = self._same_cut and kind != "sketch"
        return [part for part in chosen if part.shard == self._table.spec.shard] if is_own else chosen

    def _whole(self, part: Part, arrays: part_file.Arrays) -> tuple[Part, part_file.Arrays]:
        part_file.check_arrays(self._saved, part, arrays)
        return part, arrays

    def _own(self, part: Part, arrays: part_file.Arrays) -> tuple[Part, part_file.Arrays]:
        """The rows of the arrays that this shard owns. Raises TableError if the part has keys of another server."""
        spec = self._table.spec
        part_file.check_arrays(self._saved, part, arrays)
        found = dict(arrays)
        is_mine = owners_of(spec, found["keys"], self._link.num_servers) == part.shard
        if not is_mine.all():
            raise TableError(f"expected keys of server {part.shard}, found some of other servers")
        if not self._same_cut:
            is_mine = owners_of(spec, found["keys"], spec.num_shards) == spec.shard
            found = {name: array[is_mine] for name, array in found.items()}
        return part, self._fitting(found) if part.kind == "rows" else found

    def _fitting(self, found: part_file.Arrays) -> part_file.Arrays:
        """Arrays of rows as the table takes them: narrow values unchanged if it has the same type, else float32."""
        spec = self._table.spec
        wide = widened(found)
        width = self._table.num_words if self._is_whole else spec.dim
        wide["rows"] = np.ascontiguousarray(wide["rows"][:, :width])
        self._table.check_values(wide["keys"], wide["rows"])
        if not (has_same_type(self._saved, spec) and "row_values" in found and dtype_of(found) == spec.format.dtype):
            found = wide
        if not self._is_whole:
            found.pop("tick", None)  # steps start again from zero
            found.pop("row_state", None)
        return found


def load_dense(
    storage: Storage,
    manifest: Manifest,
    table: BlockTable,
    names: set[str] | None,
    layout: Sequence[Parameter] | None = None,
) -> int:
    """Load the values of this shard's elements: of the named parameters, or of all. Returns how many elements.

    `layout` gives the places of the model's parameters; each gets the values saved under its name. State is loaded if
    the rule is the same and all these parameters were saved at the same step, because a table has one step count.
    """
    spec = table.spec
    if layout is None:
        check_match(storage, manifest.table(spec.name), spec)
        layout = manifest.table(spec.name).parameters
    chosen = [parameter for parameter in layout if names is None or parameter.name in names]
    if not chosen:
        return 0
    known = {parameter.name: (saved, parameter) for saved in manifest.tables for parameter in saved.parameters}
    for parameter in chosen:
        check_parameter(storage, parameter, known[parameter.name][1] if parameter.name in known else None)
    sources = {known[parameter.name][0].name: known[parameter.name][0] for parameter in chosen}
    blocks = {name: read_dense(storage, manifest, saved) for name, saved in sources.items()}
    saved = known[chosen[0].name][0]
    is_whole = len({source.step for source in sources.values()}) == 1
    is_whole &= all(_same_rule(one, spec) and one.num_states == table.num_states for one in sources.values())
    if not is_whole:
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
            with _naming(f"{storage.place(manifest.save)}/*.safetensors, parameter '{parameter.name}'"):
                table.load(start - first, block)
            loaded.append((start, stop))
    table.loaded = loaded
    table.step = saved.step if is_whole else 0
    return sum(stop - start for start, stop in loaded)


def _tell_of_new_state(saved: Table, spec: TableSpec) -> None:
    """Report that state is not loaded. Tables that are not trained (prediction, fixed parameters) have no state."""
    if not spec.rule.lr or spec.name != saved.name:
        return
    num = saved.num_words - saved.dim
    same = _same_rule(saved, spec)
    now = "and other parameters at another step" if same else f"and now trained by {spec.rule.name}"
    print(
        f"table '{spec.name}': saved by {saved.rule['name']} with {num} numbers of state per row of {saved.dim}, {now}"
        ": values are loaded, the optimizer's state starts anew",
        file=sys.stderr,
        flush=True,
    )


def _tell_of_rounding(saved: Table, spec: TableSpec) -> None:
    """Report that values are rounded, because the table's type is not the one in which they were saved."""
    was, now = saved.spec().format, spec.format
    if now.is_narrow and not has_same_type(saved, spec):
        print(
            f"table '{spec.name}': saved as {was.dtype} (step='{was.step}'), and now {now.dtype} (step='{now.step}'): "
            "values are rounded to the nearest",
            file=sys.stderr,
            flush=True,
        )


def read_dense(storage: Storage, manifest: Manifest, saved: Table) -> npt.NDArray[np.float32]:
    """A dense table joined from its part files: one row of values, and one for each number of state."""
    # manifest_check.py ensures that all of it is filled
    whole = np.empty((1 + saved.num_states, saved.size), np.float32)

    def prepare(part: Part, arrays: part_file.Arrays) -> None:
        part_file.check_arrays(saved, part, arrays)
        whole[:, part.start : part.start + part.rows] = arrays["values"]

    for _ in read_parts(storage, manifest.save, manifest.parts_of(saved.name), prepare):
        pass
    return whole


def check_match(storage: Storage, saved: Table, spec: TableSpec) -> None:
    """Raise CheckpointError if a saved table cannot be loaded into a table of this kind, width and size."""
    for name in ("kind", "dim", "size"):
        if getattr(saved, name) != getattr(spec, name):
            raise CheckpointError(
                f"{storage.place(FILE)}: table '{spec.name}' was saved with {name}={getattr(saved, name)}, and the "
                f"model has {name}={getattr(spec, name)}. Load it into the model that it was saved from."
            )


def has_same_type(saved: Table, spec: TableSpec) -> bool:
    """Whether the table holds exactly the values that were saved."""
    was, now = saved.spec().format, spec.format
    return (was.dtype, was.step) == (now.dtype, now.step)


def _same_rule(saved: Table, spec: TableSpec) -> bool:
    """Whether the saved state, if there is any, has the same meaning as this table's state."""
    return saved.rule["name"] == spec.rule.name and saved.state_names == spec.rule.row_rule.state_names(spec.rule)
