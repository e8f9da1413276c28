"""Whether a manifest can be true: its checksum says that it is as it was written, not that it describes a model.

Every part is named, has its place, and no place is taken twice or left out. What is in the files is checked when they
are read (part_reader.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from torchfleet.base.errors import CheckpointError, TableError
from torchfleet.ps.checkpoint.manifest_parts import Link, Manifest, Parameter, Part, Table
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.spec import MAX_SHARDS, MAX_SIZE, TableSpec, shard_range

_SAVE = re.compile(r"save-[0-9]{1,18}")
_FILE = re.compile(r"[\w.-]{1,240}\.safetensors")
_MAX_NUMBER = 10**18


class _Wrong(Exception):
    """What is wrong; the place is known further out."""


def check_manifest(manifest: Manifest, place: str) -> None:
    """Raise CheckpointError, which names the manifest, if its contents contradict each other."""
    try:
        _check_whole(manifest)
        specs = {table.name: _spec_of(table) for table in manifest.tables}
        _expect(len(specs) == len(manifest.tables), "a table is in it twice")
        _check_chain(manifest.links(), manifest.kind)
        row_bytes = {table.name: 4 * table.dim * (1 + table.num_states) for table in manifest.tables}
        for link in manifest.links():
            _check_files(link, specs, row_bytes)
            for table in manifest.tables:
                _check_table(table, link, specs[table.name], link.save == manifest.save)
        for table in manifest.tables:
            _check_parameters(table)
        names = Counter(parameter.name for table in manifest.tables for parameter in table.parameters)
        _expect(max(names.values(), default=1) == 1, f"parameter '{_most(names)}' is in it {names[_most(names)]} times")
    except _Wrong as error:
        raise CheckpointError(f"{place} describes no model: {error}. Load another save of the model.") from None


def _most(names: Counter[str]) -> str:
    return names.most_common(1)[0][0] if names else ""


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise _Wrong(text)


def _check_whole(manifest: Manifest) -> None:
    _expect(manifest.kind in ("full", "inference"), f"expected the kind full or inference, found {manifest.kind!r}")
    _expect(0 <= manifest.token < 1 << 63, f"expected a token of 0 to 2^63 - 1, found {manifest.token}")


def _check_chain(links: Sequence[Link], kind: str) -> None:
    """A full save, and each after it the child of the one before."""
    parent = 0
    for link in links:
        _expect(bool(_SAVE.fullmatch(link.save)), f"expected a folder save-NUMBER, found {link.save!r}")
        _expect(parent < link.number < _MAX_NUMBER, f"save {link.number} stands behind save {parent}")
        _expect(link.parent == parent, f"save {link.number} continues {link.parent}, and stands behind {parent}")
        servers = f"1 to {MAX_SHARDS:,} servers"
        _expect(1 <= link.num_servers <= MAX_SHARDS, f"expected {servers}, found num_servers={link.num_servers}")
        _expect(0 <= link.time <= MAX_TIME, f"expected a time of 0 to {MAX_TIME:,} seconds, found {link.time}")
        parent = link.number
    _expect(len({link.save for link in links}) == len(links), "two saves of the chain have one folder")
    _expect(kind == "full" or len(links) == 1, "a save for prediction continues no other")


def _spec_of(table: Table) -> TableSpec:
    try:
        spec = table.spec()
    except (TableError, msgspec.ValidationError) as error:
        raise _Wrong(f"table '{table.name:.200}': {error}") from None
    _expect(
        table.num_states in (0, spec.num_states),
        f"table '{table.name}': expected {spec.num_states} numbers of state per value, or none; found "
        f"num_states={table.num_states}",
    )
    most = 1 << 32 if "tick" in spec.shrink.names else 1 << 63  # rows note the step in 32 bits
    _expect(0 <= table.step < most, f"table '{table.name}': expected a number of steps, found {table.step}")
    _expect(0 <= table.rows <= MAX_SIZE, f"table '{table.name}': expected a number of rows, found {table.rows}")
    return spec


def _check_files(link: Link, specs: dict[str, TableSpec], row_bytes: dict[str, int]) -> None:
    """Each file is one of a save of so many servers, and in it once."""
    for part in link.parts:
        _expect(bool(_FILE.fullmatch(part.file)), f"expected the name of a part file, found {part.file!r:.300}")
        _expect(part.table in specs, f"{part.file} is of table '{part.table:.200}', which is not in it")
        shards = f"{link.num_servers} servers made {link.save}"
        _expect(0 <= part.shard < link.num_servers, f"{shards}, and {part.file} is of server {part.shard}")
        is_count = 0 <= part.rows <= MAX_SIZE and 0 <= part.start <= MAX_SIZE and 0 <= part.bytes < 1 << 60
        _expect(
            is_count and 0 <= part.crc32 < 1 << 32,
            f"{part.file}: expected numbers of rows and bytes, a start and a CRC-32, found {part.rows}, {part.bytes}, "
            f"{part.start} and {part.crc32}",
        )
        _expect(
            part.bytes >= part.rows * (row_bytes[part.table] if part.kind == "rows" else 8),
            f"{part.file}: {part.rows:,} rows of table '{part.table}' do not fit into {part.bytes:,} bytes",
        )
    files = Counter(part.file for part in link.parts)
    _expect(max(files.values(), default=1) == 1, f"{_most(files)} is in it {files[_most(files)]} times")
    _expect(
        link.num_files == len(link.parts),
        f"{link.save} has {link.num_files:,} files, and {len(link.parts):,} are named",
    )


def _check_table(table: Table, link: Link, spec: TableSpec, is_newest: bool) -> None:
    """Every server has saved its share."""
    parts = link.parts_of(table.name)
    if not is_newest and not parts and spec.is_dense:
        return  # a table that came later; dense ones are whole in every save
    others = [part for part in link.parts if part.table == table.name and part.kind != "rows"]
    _expect(not spec.is_dense or not others, f"table '{table.name}' is dense, and has parts of other kinds")
    missing = sorted(set(range(link.num_servers)) - {part.shard for part in parts})[:1]
    _expect(not missing, f"table '{table.name}' has no file of server {missing} of {link.num_servers} in {link.save}")
    if spec.is_dense:
        _check_block(table, link, parts)
    else:
        starts = [part.file for part in link.parts if part.table == table.name and part.start and part.kind != "sketch"]
        _expect(not starts, f"{starts[:1]} begins in the middle of table '{table.name}', whose rows have no order")
        if spec.entry.num_blocks:
            _check_sketch(table.name, [part for part in others if part.kind == "sketch"], spec.entry.num_blocks)


def _check_block(table: Table, link: Link, parts: Iterable[Part]) -> None:
    """The elements of a dense table, each in the file of the server that holds it."""
    places = sorted((part.shard, part.start, part.start + part.rows) for part in parts)
    expected = [(i, *shard_range(table.size, i, link.num_servers)) for i in range(link.num_servers)]
    for found, place in zip(places, expected, strict=False):
        _expect(
            found == place,
            f"table '{table.name}', server {place[0]} of {link.save}: expected elements {place[1]:,} to {place[2]:,}, "
            f"found {found[1]:,} to {found[2]:,} of server {found[0]}",
        )
    _expect(len(places) == len(expected), f"table '{table.name}' has {len(places)} files of {len(expected)} servers")


def _check_sketch(table: str, parts: Sequence[Part], num_blocks: int) -> None:
    """Blocks of counters; two servers may hold one block, and none is left out."""
    at = 0
    for part in sorted(parts, key=lambda part: part.start):
        _expect(part.start <= at, f"table '{table}': no file has the counters from block {at:,} on")
        at = max(at, part.start + part.rows)
    _expect(at == num_blocks or not parts, f"table '{table}': expected {num_blocks:,} blocks of counters, found {at:,}")


def _check_parameters(table: Table) -> None:
    """They lie in their table, and none on another."""
    _expect(table.is_dense or not table.parameters, f"table '{table.name}' has rows, and parameters")
    end = 0
    for parameter in sorted(table.parameters, key=lambda parameter: (parameter.start, parameter.size)):
        _check_shape(parameter)
        _expect(
            end <= parameter.start and parameter.start + parameter.size <= table.size,
            f"parameter '{parameter.name}' takes elements {parameter.start:,} to {parameter.start + parameter.size:,}; "
            f"table '{table.name}' has {table.size:,}, and others end at {end:,}",
        )
        end = parameter.start + parameter.size


def _check_shape(parameter: Parameter) -> None:
    is_shape = all(0 <= length <= MAX_SIZE for length in parameter.shape) and len(parameter.shape) <= 64
    _expect(is_shape, f"parameter '{parameter.name}': expected a shape, found {parameter.shape!s:.200}")
    _expect(0 <= parameter.words <= MAX_SIZE, f"parameter '{parameter.name}': expected words, found {parameter.words}")
    most = 8 * math.prod(parameter.shape)  # 16 bytes an element: the widest type
    _expect(
        parameter.dtype == "float32" or parameter.words <= most,
        f"parameter '{parameter.name}': {parameter.words:,} words are too many for {parameter.described}",
    )
