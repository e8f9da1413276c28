"""A save in which a key is more often than it may be: refused by every reader, which names the file and the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.chains import PLAIN, Chain
from support.messages import naming

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.observe.commands.inspect_saved import SavedModel
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.export import export_table
from torchfleet.ps.checkpoint.manifest import Link, Part, read_manifest, write_manifest
from torchfleet.ps.checkpoint.manifest_file import read_body, write_body
from torchfleet.ps.checkpoint.part_reader import load_sparse
from torchfleet.ps.server.saves.table_saving import _files
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.sparse_table import SparseTable


def loaded(place: str) -> int:
    storage = Storage(place)
    return load_sparse(storage, read_manifest(storage), SparseTable(PLAIN, 1 << 22))


READERS: dict[str, Callable[[str], object]] = {
    "server": loaded,
    "export": lambda place: export_table(place, PLAIN.name, f"{place}/rows.txt", "text"),
    "compact": lambda place: compact(place, f"{place}/compacted"),
    "inspect": lambda place: SavedModel(place).check(),
    "summary": lambda place: SavedModel(place).summary(PLAIN.name, 3),
}
SAVES = {
    "in one file": (10, [(7, 1), (8, 2), (7, 3)], None),
    "in two files": (1, [(7, 1), (8, 2), (7, 3)], None),
    "in one file of a delta": (10, [(7, 1), (8, 2)], [(8, 5), (7, 4), (8, 6), (7, 9)]),
    "in two files of a delta": (1, [(7, 1), (8, 2)], [(8, 5), (7, 4), (7, 6)]),
}


def saved(place: str, name: str, repeats: int | None) -> None:
    rows_per_file, full, delta = SAVES[name]
    chain = Chain(place, [PLAIN], rows_per_file)
    chain.save(1, {PLAIN.name: full})
    if delta is not None:
        chain.save(1, {PLAIN.name: delta})
    manifest = read_manifest(chain.storage)

    def noted(parts: list[Part]) -> list[Part]:
        return [msgspec.structs.replace(part, repeats=repeats) for part in parts]

    base = [msgspec.structs.replace(link, parts=noted(link.parts)) for link in manifest.base]
    assert all(isinstance(link, Link) for link in base)
    write_manifest(chain.storage, msgspec.structs.replace(manifest, parts=noted(manifest.parts), base=base))


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("reader", READERS)
def test_a_key_too_often_is_refused_by_file_and_key(tmp_path: Path, reader: str, name: str) -> None:
    saved(str(tmp_path), name, 0)
    with pytest.raises(CheckpointError, match=naming("7", ".safetensors", PLAIN.name)) as caught:
        READERS[reader](str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("repeats", [2, None])
def test_rows_that_were_dropped_and_made_again_may_repeat(tmp_path: Path, repeats: int | None, name: str) -> None:
    """None: a save of a version that did not count."""
    saved(str(tmp_path), name, repeats)
    assert loaded(str(tmp_path)) == 2
    assert export_table(str(tmp_path), PLAIN.name, str(tmp_path / "rows.txt"), "text") == 2


def test_a_server_notes_how_many_keys_may_repeat() -> None:
    server = Server(1 << 22)
    server.state.add_table(PLAIN)
    table = server.state.tables[PLAIN.number]
    keys = np.arange(40_000, dtype=np.uint64)
    table.pull(keys)
    files = [file for file in _files(table, "full") if file is not None]
    assert [file.repeats for file in files] == [0]
    slices = _files(table, "full")
    assert next(slices) is None  # the first slice is copied
    table.erase(keys[:3])
    table.pull(keys[:3])
    (last,) = [file for file in slices if file is not None]
    found = np.concatenate(last.arrays["keys"])
    assert last.repeats == 3
    assert len(found) - len(np.unique(found)) <= 3


def test_a_name_twice_in_a_manifest_is_refused(tmp_path: Path) -> None:
    saved(str(tmp_path), "in one file", None)
    storage = Storage(str(tmp_path))
    body = read_body(storage).replace(b'"num_servers": 1', b'"num_servers": 2, "num_servers": 1', 1)
    write_body(storage, body)
    with pytest.raises(CheckpointError, match=naming("manifest.json", "num_servers")):
        read_manifest(storage)
