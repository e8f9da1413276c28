"""Saved models to test with, at the level of clients and servers: save, load, and what tables hold, key by key."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.ps.checkpoint.manifest import (
    Manifest,
    Parameter,
    described,
    next_save,
    read_manifest,
    remove_others,
    write_manifest,
)
from torchfleet.ps.checkpoint.part_reader import read_part
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client

SECONDS = 30.0
MAX_TABLE_BYTES = 1 << 26

Contents = dict[str, dict[int, bytes]]


def save(
    client: Client, specs: Sequence[TableSpec], dirname: str, with_state: bool = True, seconds: float = SECONDS
) -> Manifest:
    """What worker 0 does: every server its tables, then the manifest, then the old folders go."""
    storage = Storage(dirname)
    token = secrets.randbits(62) + 1
    with reserve(storage, next_save(storage), token) as held:
        saved = client.save(storage.path, held.folder, with_state, seconds, token=token)
        held.release()
    tables = []
    for spec in specs:
        step = max(server.steps[spec.name] for server in saved)
        rows = sum(server.rows[spec.name] for server in saved)
        tables.append(described(spec, with_state, step, rows, whole_layout(spec)))
    parts = [part for server in saved for part in server.parts]
    kind = "full" if with_state else "inference"
    manifest = Manifest(held.folder, held.number, kind, client.num_servers, tables, parts, num_files=len(parts))
    write_manifest(storage, manifest)
    remove_others(storage, manifest)
    return manifest


def whole_layout(spec: TableSpec) -> list[Any]:
    """A dense table as one parameter of the same name."""
    return [Parameter(spec.name, [spec.size], 0)] if spec.kind == "dense" else []


def load(num_servers: int, specs: Sequence[TableSpec], dirname: str) -> list[Server]:
    """New servers with all of the model."""
    servers = [Server(MAX_TABLE_BYTES) for _ in range(num_servers)]
    for index, server in enumerate(servers):
        for spec in specs:
            server.state.add_table(spec.for_shard(index, num_servers))
        load_model(server.state, dirname, None)
    return servers


def contents(servers: Sequence[Server]) -> Contents:
    """Per table: every row (or element of a dense table) with its state. A row on two servers is an error."""
    found: Contents = {}
    for server in servers:
        for table in server.state.tables.values():
            rows = found.setdefault(table.spec.name, {})
            for key, row in _rows_of(table):
                assert key not in rows, f"'{table.spec.name}': {key} is on two servers"
                rows[key] = row
    return found


def _rows_of(table: Any) -> list[tuple[int, bytes]]:
    if table.spec.kind == "dense":
        first = table.spec.size * table.spec.shard // table.spec.num_shards
        return [(first + i, column.tobytes()) for i, column in enumerate(table.block().T)]
    return [
        (key, row.tobytes()) for keys, rows, _ in table.chunks() for key, row in zip(keys.tolist(), rows, strict=True)
    ]


def rows_on_disk(dirname: str, table: str) -> list[tuple[int, np.ndarray]]:
    """Every row in the files of a sparse table, as often as it is there."""
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    return [
        (key, row)
        for arrays in (read_part(storage, manifest.save, part) for part in manifest.parts_of(table))
        for key, row in zip(arrays["keys"].tolist(), arrays["rows"], strict=True)
    ]
