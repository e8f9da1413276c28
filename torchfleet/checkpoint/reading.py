"""From part files to tables: every byte checked, every row to the server that owns it now."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchfleet.checkpoint import parts
from torchfleet.checkpoint.manifest import Manifest, Parameter, Part, Table
from torchfleet.checkpoint.storage import Storage
from torchfleet.errors import CheckpointError
from torchfleet.tables.dense import DenseTable
from torchfleet.tables.owners import owners_of
from torchfleet.tables.sparse import SparseTable
from torchfleet.tables.spec import TableSpec, part_range

Made = TypeVar("Made")

_AHEAD = 3  # files being read while another one is taken in


def read_part(storage: Storage, manifest: Manifest, part: Part) -> parts.Arrays:
    """The part's arrays. A file that is missing, cut off or changed by a single bit is named."""
    name = f"{manifest.save}/{part.file}"
    data = storage.read(name)
    place = storage.place(name)
    if len(data) != part.bytes:
        raise CheckpointError(f"{place} is damaged: {len(data):,} bytes, and {part.bytes:,} were saved")
    if parts.checksum([data]) != part.crc32:
        raise CheckpointError(f"{place} is damaged: its checksum is not the one that was saved")
    return parts.decode(data, place)


def read_parts(
    storage: Storage, manifest: Manifest, chosen: Sequence[Part], prepare: Callable[[Part, parts.Arrays], Made]
) -> Iterator[Made]:
    """What `prepare` makes of each part, in turn; the next ones are read and prepared meanwhile, in threads."""

    def read(part: Part) -> Made:
        return prepare(part, read_part(storage, manifest, part))

    with ThreadPoolExecutor(_AHEAD) as pool:
        under_way = deque(pool.submit(read, part) for part in chosen[:_AHEAD])
        for following in range(_AHEAD, len(chosen) + _AHEAD):
            if not under_way:
                return
            made = under_way.popleft().result()
            if following < len(chosen):
                under_way.append(pool.submit(read, chosen[following]))
            yield made


def load_sparse(storage: Storage, manifest: Manifest, table: SparseTable, quiet: bool = False) -> int:
    """All saved rows that this table's part owns, with their state if it is of the same kind. Returns how many."""
    spec, saved = table.spec, manifest.table(table.spec.name)
    check_match(saved, spec)
    is_whole = spec.dim * (1 + saved.num_states) == table.num_words and _same_rule(saved, spec)
    width = table.num_words if is_whole else spec.dim
    if not is_whole and not quiet:
        _tell_of_new_state(saved, spec)
    chosen = manifest.parts_of(spec.name)
    same_cut = manifest.num_servers == spec.num_parts
    if same_cut:
        chosen = [part for part in chosen if part.part == spec.part]
    share = 1 if same_cut else spec.num_parts
    table.reserve(sum(part.rows for part in chosen) // share)

    def own_rows(part: Part, arrays: parts.Arrays) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
        keys, rows = arrays["keys"].reshape(-1), arrays["rows"]
        if rows.shape != (len(keys), spec.dim * (1 + saved.num_states)):
            raise CheckpointError(f"{part.file}: {len(keys)} keys and rows of shape {rows.shape} do not fit")
        if not same_cut:
            mine = owners_of(spec, keys, spec.num_parts) == spec.part
            keys, rows = keys[mine], rows[mine]
        rows = np.ascontiguousarray(rows[:, :width])
        table.check_values(keys, rows)
        return keys, rows

    num = 0
    for keys, rows in read_parts(storage, manifest, chosen, own_rows):
        table.load(keys, rows)
        num += len(keys)
    table.step, table.num_loaded = saved.step if is_whole else 0, num
    return num


def load_dense(
    storage: Storage,
    manifest: Manifest,
    table: DenseTable,
    names: set[str] | None,
    layout: Sequence[Parameter] | None = None,
) -> int:
    """Values of this part's elements: of the named parameters, or of all. Returns how many elements.

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
    for parameter in chosen:
        _check_parameter(storage, parameter, known[parameter.name][1] if parameter.name in known else None)
    sources = {known[parameter.name][0].name: known[parameter.name][0] for parameter in chosen}
    blocks = {name: read_dense(storage, manifest, saved) for name, saved in sources.items()}
    saved = known[chosen[0].name][0]
    is_whole = len(chosen) == len(layout) and len(sources) == 1 and _same_rule(saved, spec)
    is_whole = is_whole and saved.num_states == table.num_states
    if not is_whole and names is None:
        _tell_of_new_state(saved, spec)
    first, last = part_range(spec.size, spec.part, spec.num_parts)
    loaded = []
    for parameter in chosen:
        source, there = known[parameter.name]
        start = max(first, parameter.start)
        stop = min(last, parameter.start + int(np.prod(parameter.shape, dtype=np.int64)))
        if start < stop:
            shift = there.start - parameter.start
            block = blocks[source.name][: None if is_whole else 1, start + shift : stop + shift]
            table.load(start - first, block)
            loaded.append((start, stop))
    table.loaded = loaded
    table.step = saved.step if is_whole else 0
    return sum(stop - start for start, stop in loaded)


def _check_parameter(storage: Storage, parameter: Parameter, saved: Parameter | None) -> None:
    if saved is None:
        raise CheckpointError(f"{storage.path} has no parameter '{parameter.name}' of this model")
    if saved.shape != parameter.shape:
        raise CheckpointError(
            f"parameter '{parameter.name}' was saved with shape {tuple(saved.shape)}, and the model has "
            f"{tuple(parameter.shape)}"
        )


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
    """A dense table put together from its parts: a row of values, and one for each kind of state."""
    whole = np.empty((1 + saved.num_states, saved.size), np.float32)
    num = 0
    for part, arrays in read_parts(storage, manifest, manifest.parts_of(saved.name), lambda *both: both):
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
