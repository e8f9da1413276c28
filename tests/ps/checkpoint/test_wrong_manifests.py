"""Manifests with a fitting checksum that describe no model: each is refused by name, and no table is changed."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import each_of
from support.fleets import in_process
from support.messages import naming
from support.scripts.saved_models import MAX_TABLE_BYTES, contents, load, save

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.observe.commands.inspect_saved import SavedModel
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.manifest_file import read_body, write_body
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import CountFilterEntry, Shrink, WindowCountEntry, combined
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec

ADAM = Rule("adam", lr=0.125)
ITEMS = TableSpec(
    "items",
    dim=2,
    rule=ADAM,
    initializer=Initializer("uniform", -1.0, 1.0),
    entry=combined([CountFilterEntry(2), WindowCountEntry(1, 24.0, 1 << 19)]),
    shrink=Shrink(max_rows=10_000, delete_after_unseen_days=9),
)
PLAIN = TableSpec("plain", dim=1, rule=Rule("sgd"))
IDS = TableSpec("ids", "array", dim=1, size=100, rule=Rule("adagrad"))
DENSE = TableSpec("dense", "dense", size=29, rule=ADAM)
SPECS = [ITEMS, PLAIN, IDS, DENSE]

Manifest = dict[str, Any]
Change = Callable[[Manifest], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two servers."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    with in_process(2) as fleet:
        client = fleet.client()
        for spec in SPECS:
            client.create_table(spec)
        for keys in (np.arange(40), np.arange(30)):
            client.pull("items", keys).result()
        client.push("plain", np.arange(50), np.ones((50, 1), np.float32)).result()
        client.push("ids", np.arange(0, 100, 3), np.ones((34, 1), np.float32)).result()
        client.push_dense("dense", np.ones(29, np.float32)).result()
        save(client, SPECS, str(folder))
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def manifest_of(model: Path) -> Manifest:
    found: Manifest = json.loads(read_body(Storage(str(model))))
    return found


def parts(manifest: Manifest, table: str, kind: str = "rows") -> list[dict[str, Any]]:
    return [part for part in manifest["parts"] if (part["table"], part["kind"]) == (table, kind)]


def table(manifest: Manifest, name: str) -> dict[str, Any]:
    return next(table for table in manifest["tables"] if table["name"] == name)


def put(value: Any, *path: Any) -> Change:
    """Set what the path leads to."""

    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def of_part(kind: str, name: str, /, **fields: Any) -> Change:
    """Fields of the first part of a table."""

    def change(manifest: Manifest) -> None:
        parts(manifest, name, kind)[0].update(fields)

    return change


def of_table(name: str, /, **fields: Any) -> Change:
    return lambda manifest: table(manifest, name).update(fields)


def without(*path: Any) -> Change:
    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change


def without_part(name: str, kind: str = "rows", which: int = -1) -> Change:
    return lambda manifest: manifest["parts"].remove(parts(manifest, name, kind)[which])


def part_twice(name: str, kind: str = "rows") -> Change:
    """One part in the place of the other, which is missing then."""

    def change(manifest: Manifest) -> None:
        first, second = parts(manifest, name, kind)[:2]
        second.update({**first, "part": second["part"]})

    return change


def swapped(name: str, *fields: str) -> Change:
    """What two parts say of themselves, exchanged."""

    def change(manifest: Manifest) -> None:
        first, second = parts(manifest, name)[:2]
        for field in fields:
            first[field], second[field] = second[field], first[field]

    return change


def with_base(**fields: Any) -> Change:
    """The save as a delta of itself under another name."""

    def change(manifest: Manifest) -> None:
        link = {name: copy.deepcopy(manifest[name]) for name in ("save", "number", "num_servers", "parts")}
        manifest.update({"number": 2, "parent": 1, "base": [{**link, "parent": 0, **fields}]})

    return change


NAMES = ["../{0}", "/etc/passwd", "/tmp/{0}", "a/../../{0}", "./{0}", "", ".", "..", "{0}\0", "{0}.exe", "x" * 300]
PARAMETER = {"name": "dense", "shape": [29], "start": 0}

VARIANTS: dict[str, Change] = {
    "dense part twice": part_twice("dense"),
    "dense part missing": without_part("dense"),
    "dense parts swapped": swapped("dense", "file", "bytes", "crc32"),
    "dense shards swapped": swapped("dense", "part"),
    "dense starts swapped": swapped("dense", "start"),
    "dense part empty": of_part("rows", "dense", rows=0),
    "dense part of another kind": of_part("rows", "dense", kind="gone"),
    "rows missing, last part": without_part("plain"),
    "rows missing, first part": without_part("plain", which=0),
    "rows twice": part_twice("plain"),
    "rows' shards swapped": swapped("plain", "part"),
    "rows' files swapped": swapped("plain", "file", "bytes", "crc32", "rows"),
    "rows' counts swapped": of_part("rows", "plain", rows=1),
    "counters missing": without_part("items", "sketch"),
    "counters from elsewhere on": of_part("sketch", "items", start=64),
    "candidates missing": without_part("items", "candidates"),
    "candidates that are rows": of_part("candidates", "items", kind="rows"),
    "rows that are candidates": of_part("rows", "items", kind="candidates"),
    "rows that are gone": of_part("rows", "plain", kind="gone"),
    "a kind that nobody knows": of_part("rows", "plain", kind="columns"),
    "rows of another table": of_part("rows", "plain", table="items"),
    "rows of no table": of_part("rows", "plain", table="nothing"),
    "all parts missing": put([], "parts"),
    **{f"{num} files": put(num, "num_files") for num in (0, 3)},
    "an array as rows of any id": of_table("ids", kind="sparse", size=0),
    "a smaller array": of_table("ids", size=50),
    **{f"num_servers={num}": put(num, "num_servers") for num in (-1, 0, 1, 3, 1 << 17, 2.5, "2", None)},
    **{f"dense start={start}": of_part("rows", "dense", start=start) for start in (-1, 1, 14, 1 << 40, 1 << 70)},
    **{f"rows start={start}": of_part("rows", "plain", start=start) for start in (-1, 7)},
    **{f"dense rows={num}": of_part("rows", "dense", rows=num) for num in (-1, 13, 15, 1 << 40, 1 << 70)},
    **{f"rows={num}": of_part("rows", "plain", rows=num) for num in (-1, 1 << 40, 1 << 70, "many")},
    **{f"part={num}": of_part("rows", "plain", part=num) for num in (-1, 2, 1 << 40)},
    **{f"bytes={num}": of_part("rows", "plain", bytes=num) for num in (-1, 0, 1 << 62)},
    **{f"crc32={num}": of_part("rows", "plain", crc32=num) for num in (-1, 0, 1 << 32)},
    **{f"size={size}": of_table("dense", size=size) for size in (0, -1, 28, 30, 1 << 47, 1 << 70)},
    **{f"dim={dim}": of_table("plain", dim=dim) for dim in (0, -1, 2, 1 << 16, 1 << 40)},
    **{f"num_states={num}": of_table("items", num_states=num) for num in (-1, 1, 3, 1 << 40)},
    **{f"step={step}": of_table("items", step=step) for step in (-1, 1 << 33, 1 << 70)},
    "rows of the table, negative": of_table("plain", rows=-1),
    **{f"file={name[:20]!r}": of_part("rows", "plain", file=name.format("a.safetensors")) for name in NAMES},
    **{f"save={name[:20]!r}": put(name.format("save-000001"), "save") for name in NAMES},
    "save of nobody": put("save-000002", "save"),
    **{f"number={num}": put(num, "number") for num in (0, -1, 1 << 70)},
    "a parent that is not there": put(7, "parent"),
    **{f"time={time}": put(time, "time") for time in (-1.0, 1e300, "now")},
    **{f"token={token}": put(token, "token") for token in (-1, 1 << 63)},
    **{f"kind={kind!r}": put(kind, "kind") for kind in ("", "delta", 7)},
    **{f"version={version}": put(version, "version") for version in (0, 1, 3, "2")},
    "another format": put("torchfleet collective checkpoint", "format"),
    **{f"without {name}": without(name) for name in ("save", "number", "kind", "num_servers", "tables", "parts")},
    "without a part's file": without("parts", 0, "file"),
    "without a table's rule": without("tables", 0, "rule"),
    "a field that nobody knows": put(1, "more"),
    "a part's field that nobody knows": of_part("rows", "plain", link="/etc/passwd"),
    "a table's field that nobody knows": of_table("plain", code="1"),
    "tables are no list": put({}, "tables"),
    "a table twice": lambda manifest: manifest["tables"].append(manifest["tables"][0]),
    "a table missing": without("tables", 1),
    "a table without a name": of_table("plain", name=""),
    "a kind of table that nobody knows": of_table("plain", kind="tree"),
    "a rule that nobody knows": of_table("plain", rule={"name": "magic"}),
    "a rule without a name": of_table("items", rule={"lr": 0.1}),
    "a rule that is no rule": of_table("plain", rule={"name": "sgd", "lr": "fast"}),
    "a rule with more fields": of_table("plain", rule={"name": "sgd", "hook": "os.system"}),
    "an initializer that nobody knows": of_table("plain", initializer={"name": "code"}),
    "an entry that cannot be": of_table("items", entry={"count": -3}),
    "a shrink that cannot be": of_table("items", shrink={"where": "__import__('os')"}),
    "a seed that cannot be": of_table("plain", seed=-1),
    "parameters of rows": of_table("plain", parameters=[PARAMETER]),
    "a parameter twice": of_table("dense", parameters=[{**PARAMETER, "shape": [3]}, {**PARAMETER, "start": 3}]),
    **{
        f"parameter {name}={value}": of_table("dense", parameters=[{**PARAMETER, name: value}])
        for name, value in {
            "start": -1,
            "shape": [30],
            "words": -1,
            "dtype": 7,
        }.items()
    },
    "parameter shape=[-1, -29]": of_table("dense", parameters=[{**PARAMETER, "shape": [-1, -29]}]),
    "parameter shape of 2^70": of_table("dense", parameters=[{**PARAMETER, "shape": [1 << 70]}]),
    "parameters on each other": of_table("dense", parameters=[PARAMETER, {**PARAMETER, "name": "b", "start": 5}]),
    "bytes of 29 elements in 3,000 words": of_table(
        "dense", parameters=[{**PARAMETER, "dtype": "int64", "words": 3000}]
    ),
    "a chain in one folder": with_base(),
    "a chain that begins with a delta": with_base(save="save-000009", parent=3),
    "a chain that runs backwards": with_base(save="save-000009", number=5),
    "a chain over a folder above": with_base(save="../save-000009"),
    "a chain over nothing": with_base(save="save-000009"),
    "a chain without servers": with_base(save="save-000009", num_servers=0),
    "a chain that is no list": put({"save": 1}, "base"),
}


def refused(model: Path, match: str = ".") -> None:
    """By every loader, with the name of a file, and before a table is changed."""
    server = Server(MAX_TABLE_BYTES)
    for spec in SPECS:
        server.state.add_table(spec.for_shard(0, 2))
    fresh = contents([server])
    with pytest.raises(CheckpointError, match=match) as caught:
        load_model(server.state, str(model), None)
    assert str(model) in str(caught.value), "the error names no file"
    assert ".json" in str(caught.value) or ".safetensors" in str(caught.value)
    assert contents([server]) == fresh
    assert {table.step for table in server.state.tables.values()} == {0}
    assert not server.state.clock.is_set
    assert not server.state.saves.model


def test_the_model_itself_is_loaded(model: Path) -> None:
    assert {name: len(rows) for name, rows in contents(load(2, SPECS, str(model))).items()} == {
        "items": 30,
        "plain": 50,
        "ids": 34,
        "dense": 29,
    }
    assert len(VARIANTS) >= 56


@each_of("name", VARIANTS)
def test_a_manifest_that_describes_no_model_is_refused_by_name(saved: Path, model: Path, name: str) -> None:
    manifest = manifest_of(saved)
    VARIANTS[name](manifest)
    write_body(Storage(str(model)), json.dumps(manifest).encode())
    refused(model)


@each_of(
    "body", [b"", b"{}", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"{" * 100_000, b'{"a":' * 100_000 + b"1"], ids=repr
)
def test_what_is_no_manifest_at_all_is_refused_by_name(model: Path, body: bytes) -> None:
    write_body(Storage(str(model)), body)
    refused(model, r"manifest\.json")


# What is in the files, with checksums that fit


def rewritten(model: Path, name: str, change: Callable[[dict[str, Any]], Any], kind: str = "rows") -> None:
    """The first part of a table with other arrays, and the manifest that says so."""
    manifest = manifest_of(model)
    part = parts(manifest, name, kind)[0]
    place = model / manifest["save"] / part["file"]
    arrays = {key: array.copy() for key, array in part_file.decode(place.read_bytes(), str(place)).items()}
    arrays = change(arrays) or arrays
    buffers = part_file.encode(arrays)
    place.write_bytes(b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers))
    part.update({"bytes": place.stat().st_size, "crc32": part_file.checksum(buffers)})
    write_body(Storage(str(model)), json.dumps(manifest).encode())


def fill(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays[name].fill(value)


def change_array(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda arrays: {**arrays, name: change(arrays[name])}


CONTENTS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Any]]] = {
    "all keys equal": ("plain", "rows", lambda arrays: arrays["keys"].fill(arrays["keys"][0])),
    "one key twice": ("plain", "rows", lambda arrays: arrays["keys"][1:2].fill(arrays["keys"][0])),
    "one id twice": ("ids", "rows", lambda arrays: arrays["keys"][1:2].fill(arrays["keys"][0])),
    "keys of other servers": ("plain", "rows", change_array("keys", lambda keys: keys + np.uint64(1000))),
    "keys that are signed": ("plain", "rows", change_array("keys", lambda keys: keys.astype(np.int64))),
    "no keys": ("plain", "rows", lambda arrays: {"rows": arrays["rows"]}),
    "no rows": ("plain", "rows", lambda arrays: {"keys": arrays["keys"]}),
    "fewer keys": ("plain", "rows", change_array("keys", lambda keys: keys[1:])),
    "fewer rows": ("plain", "rows", change_array("rows", lambda rows: rows[1:])),
    "flat rows": ("plain", "rows", change_array("rows", lambda rows: rows.reshape(-1))),
    "rows of numbers": ("plain", "rows", change_array("rows", lambda rows: rows.view(np.uint32))),
    "rows that are NaN": ("plain", "rows", fill("rows", np.nan)),
    "rows that are infinite": ("plain", "rows", fill("rows", np.inf)),
    "another array": ("plain", "rows", lambda arrays: {**arrays, "code": arrays["keys"]}),
    "ids beyond the size": ("ids", "rows", fill("keys", 1000)),
    "times that are floats": ("items", "rows", change_array("seen", lambda seen: seen.astype(np.float32))),
    "no block": ("dense", "rows", lambda arrays: {"other": arrays["values"]}),
    "a block without state": ("dense", "rows", change_array("values", lambda values: values[:1])),
    "a longer block": ("dense", "rows", change_array("values", lambda values: np.tile(values, 2))),
    "a block that is NaN": ("dense", "rows", fill("values", np.nan)),
    "no counters": ("items", "sketch", lambda arrays: {"keys": arrays["blocks"]}),
    "counters in other blocks": ("items", "sketch", change_array("blocks", lambda blocks: blocks.reshape(-1, 32))),
    "candidates without keys": ("items", "candidates", lambda arrays: {"count": arrays["count"]}),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_holds_something_else_is_refused_by_name(model: Path, name: str) -> None:
    of, kind, change = CONTENTS[name]
    rewritten(model, of, change, kind)
    refused(model)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_links_that_lead_outside_are_refused_and_those_inside_are_read(model: Path, tmp_path: Path, what: str) -> None:
    manifest = manifest_of(model)
    place = model / manifest["save"] if what == "folder" else model / manifest["save"] / manifest["parts"][0]["file"]
    inside, outside = model / "elsewhere", tmp_path / "elsewhere"
    os.rename(place, inside)
    place.symlink_to(inside)
    load(1, SPECS, str(model))
    os.rename(inside, outside)
    os.remove(place)
    place.symlink_to(outside)
    refused(model)


def test_a_check_says_that_a_table_holds_what_is_not_finite(model: Path) -> None:
    assert SavedModel(str(model)).check() == len(manifest_of(model)["parts"])
    rewritten(model, "plain", fill("rows", np.inf))
    with pytest.raises(CheckpointError, match=naming("plain", "NaN")):
        SavedModel(str(model)).check()
