"""Checks that a manifest is consistent: its checksum only shows that it is as written, not that it describes a model.

Every part must have a name and a place, and no place may be taken twice or be missing. The contents of the files are
checked when they are read (part_reader.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from torchfleet.base.errors import CheckpointError, TableError
from torchfleet.ps.checkpoint.manifest_parts import Link, Manifest, Parameter, Part, Table
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.spec import MAX_SHARDS, MAX_SIZE, TableSpec, shard_range

_SAVE = re.compile(r"save-[0-9]{1,18}")
_FILE = re.compile(r"[\w.-]{1,240}\.safetensors")
_MAX_NUMBER = 10**18
_PLACE = attrgetter("shard", "start", "rows")


class _Wrong(Exception):
    """What is wrong; the caller adds the place."""


def check_manifest(manifest: Manifest, place: str) -> None:
    """Raise CheckpointError, which names the manifest, if its contents contradict each other."""
    try:
        _check_whole(manifest)
        specs = _specs_of(manifest.tables)
        links = manifest.links()
        _check_chain(links, manifest.kind)
        for link in links:
            _check_files(manifest, link)
            for table in manifest.tables:
                _check_table(table, link, specs[table.name], link.save == manifest.save)
        _check_parameters(manifest.tables)
    except _Wrong as error:
        raise CheckpointError(f"{place} describes no model: {error}. Load another save of the model.") from None


def _check_whole(manifest: Manifest) -> None:
    if manifest.kind not in ("full", "inference"):
        raise _Wrong(f"expected the kind full or inference, found {manifest.kind!r}")
    if not 0 <= manifest.token < 1 << 63:
        raise _Wrong(f"expected a token of 0 to 2^63 - 1, found {manifest.token}")


def _check_chain(links: Sequence[Link], kind: str) -> None:
    """The first link must be a full save, and the parent of each other link is the link before it."""
    parent, folders = 0, set()
    for link in links:
        if not _SAVE.fullmatch(link.save):
            raise _Wrong(f"expected a folder save-NUMBER, found {link.save!r}")
        if not parent < link.number < _MAX_NUMBER:
            raise _Wrong(
                f"save {link.number} follows save {parent} in the chain: expected numbers that increase, below 10^18"
            )
        if link.parent != parent:
            raise _Wrong(
                f"save {link.number}: expected the parent {parent}, found {link.parent} (0: none, a full save)"
            )
        if not 1 <= link.num_servers <= MAX_SHARDS:
            raise _Wrong(f"expected 1 to {MAX_SHARDS:,} servers, found num_servers={link.num_servers}")
        if not 0 <= link.time <= MAX_TIME:
            raise _Wrong(f"expected a time of 0 to {MAX_TIME:,} seconds, found {link.time}")
        if link.save in folders:
            raise _Wrong("two saves of the chain have one folder")
        parent = link.number
        folders.add(link.save)
    if kind != "full" and len(links) != 1:
        raise _Wrong("a save for prediction continues no other")


def _specs_of(tables: Sequence[Table]) -> dict[str, TableSpec]:
    specs: dict[str, TableSpec] = {}
    for table in tables:
        try:
            spec = table.spec()
        except (TableError, msgspec.ValidationError) as error:
            raise _Wrong(f"table '{table.name:.200}': {error}") from None
        if (table.num_states, table.num_row_states) not in ((0, 0), (spec.num_states, spec.num_row_states)):
            raise _Wrong(
                f"table '{table.name}': expected {spec.num_states} numbers of state per value and "
                f"{spec.num_row_states} per row, or none; found num_states={table.num_states}, "
                f"num_row_states={table.num_row_states}"
            )
        most = 1 << 32 if "tick" in spec.shrink.names else 1 << 63  # rows store the step in 32 bits
        if not 0 <= table.step < most:
            raise _Wrong(f"table '{table.name}': expected a number of steps, found {table.step}")
        if not 0 <= table.rows <= MAX_SIZE:
            raise _Wrong(f"table '{table.name}': expected a number of rows, found {table.rows}")
        if table.name in specs:
            raise _Wrong(f"table '{table.name}' is listed twice")
        specs[table.name] = spec
    return specs


def _check_files(manifest: Manifest, link: Link) -> None:
    """Each file belongs to one of the save's servers, and is listed once."""
    row_bytes, files = {}, set()
    for table in manifest.tables:
        # rows of earlier saves of the chain may have had a narrower type: at least a byte per value
        is_newest, least = link.save == manifest.save, 4 * (table.num_words - table.dim) + table.dim
        row_bytes[table.name] = table.row_bytes if is_newest or table.is_dense else least
    for part in link.parts:
        if not _FILE.fullmatch(part.file):
            raise _Wrong(f"expected the name of a part file, found {part.file!r:.300}")
        if part.table not in row_bytes:
            raise _Wrong(f"{part.file} is of table '{part.table:.200}', which is not in it")
        if not 0 <= part.shard < link.num_servers:
            raise _Wrong(f"{link.num_servers} servers made {link.save}, and {part.file} is of server {part.shard}")
        is_count = 0 <= part.rows <= MAX_SIZE and 0 <= part.start <= MAX_SIZE and 0 <= part.bytes < 1 << 60
        if not is_count or not 0 <= part.crc32 < 1 << 32:
            raise _Wrong(
                f"{part.file}: expected numbers of rows and bytes, a start and a CRC-32, found {part.rows}, "
                f"{part.bytes}, {part.start} and {part.crc32}"
            )
        if part.bytes < part.rows * (row_bytes[part.table] if part.kind == "rows" else 8):
            raise _Wrong(
                f"{part.file}: {part.rows:,} rows of table '{part.table}' do not fit into {part.bytes:,} bytes"
            )
        if part.repeats is not None and not 0 <= part.repeats <= MAX_SIZE:
            raise _Wrong(f"{part.file}: expected a number of keys that may repeat, found {part.repeats}")
        if part.file in files:
            raise _Wrong(f"{part.file} is in it more than once")
        files.add(part.file)
    if link.num_files != len(link.parts):
        raise _Wrong(f"{link.save} has {link.num_files:,} files, and {len(link.parts):,} are named")


def _check_table(table: Table, link: Link, spec: TableSpec, is_newest: bool) -> None:
    """Every server has saved its share."""
    parts: list[Part] = []
    others: list[Part] = []
    for part in link.parts:
        if part.table == table.name:
            (parts if part.kind == "rows" else others).append(part)
    if not is_newest and not parts and spec.is_dense:
        return  # a table added later; dense tables are whole in every save
    missing = set(range(link.num_servers))
    for part in parts:
        missing.discard(part.shard)
    if missing:
        raise _Wrong(f"table '{table.name}' has no file of server {min(missing)} of {link.num_servers} in {link.save}")
    if spec.is_dense:
        if others:
            raise _Wrong(f"table '{table.name}' is dense, and has parts of other kinds")
        _check_block(table, link, parts)
        return
    for part in (*parts, *others):
        if part.start and part.kind != "sketch":
            raise _Wrong(f"{part.file} begins in the middle of table '{table.name}', whose rows have no order")
    if spec.entry.num_blocks:
        _check_sketch(table.name, [part for part in others if part.kind == "sketch"], spec.entry.num_blocks)


def _check_block(table: Table, link: Link, parts: Sequence[Part]) -> None:
    """The elements of a dense table, each in the file of the server that holds it."""
    for server, part in enumerate(sorted(parts, key=_PLACE)):
        start, stop = shard_range(table.size, server, link.num_servers)
        if (part.shard, part.start, part.start + part.rows) != (server, start, stop):
            raise _Wrong(
                f"table '{table.name}', server {server} of {link.save}: expected elements {start:,} to {stop:,}, "
                f"found {part.start:,} to {part.start + part.rows:,} of server {part.shard}"
            )
    if len(parts) != link.num_servers:
        raise _Wrong(f"table '{table.name}' has {len(parts)} files of {link.num_servers} servers")


def _check_sketch(table: str, parts: Sequence[Part], num_blocks: int) -> None:
    """Blocks of counters: two servers may hold the same block, and no block may be missing."""
    at = 0
    for part in sorted(parts, key=attrgetter("start")):
        if part.start > at:
            raise _Wrong(f"table '{table}': no file has the counters from block {at:,} on")
        at = max(at, part.start + part.rows)
    if parts and at != num_blocks:
        raise _Wrong(f"table '{table}': expected {num_blocks:,} blocks of counters, found {at:,}")


def _check_parameters(tables: Sequence[Table]) -> None:
    """Parameters lie within their table without overlap, and names are unique."""
    names = set()
    for table in tables:
        if table.parameters and not table.is_dense:
            raise _Wrong(f"table '{table.name}' has rows, and parameters")
        end = 0
        for parameter in sorted(table.parameters, key=attrgetter("start", "size")):
            _check_shape(parameter)
            last = parameter.start + parameter.size
            if parameter.start < end or last > table.size:
                raise _Wrong(
                    f"parameter '{parameter.name}' takes elements {parameter.start:,} to {last:,}; table "
                    f"'{table.name}' has {table.size:,}, and others end at {end:,}"
                )
            if parameter.name in names:
                raise _Wrong(f"parameter '{parameter.name}' is in it more than once")
            names.add(parameter.name)
            end = last


def _check_shape(parameter: Parameter) -> None:
    shape = parameter.shape
    if len(shape) > 64 or min(shape, default=0) < 0 or max(shape, default=0) > MAX_SIZE:
        raise _Wrong(f"parameter '{parameter.name}': expected a shape, found {shape!s:.200}")
    if not 0 <= parameter.words <= MAX_SIZE:
        raise _Wrong(f"parameter '{parameter.name}': expected words, found {parameter.words}")
    most = 8 * math.prod(shape)  # 16 bytes an element: the widest type
    if parameter.dtype != "float32" and parameter.words > most:
        raise _Wrong(f"parameter '{parameter.name}': {parameter.words:,} words are too many for {parameter.described}")
