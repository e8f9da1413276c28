"""Collective manifests with a fitting checksum that describe no model: refused by name, before a tensor is changed."""

from __future__ import annotations

import copy
import json
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import each_of

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import read
from torchfleet.collective.checkpoint.loading import load
from torchfleet.collective.checkpoint.saving import save
from torchfleet.ps.checkpoint.manifest_file import read_body, write_body

ALONE: Any = types.SimpleNamespace(rank=0, size=1)
FILE = "rank-00000-of-00001.safetensors"

Manifest = dict[str, Any]
Change = Callable[[Manifest], None]


def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    model, optimizer = made(1)
    save(str(folder), model, optimizer, [], ALONE, {"epoch": 3})
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def put(value: Any, *path: Any) -> Change:
    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def without(*path: Any) -> Change:
    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change


def of_piece(**fields: Any) -> Change:
    """Of the first tensor, the weight of the first layer."""
    return lambda manifest: manifest["tensors"][0]["pieces"][0].update(fields)


def of_tensor(**fields: Any) -> Change:
    return lambda manifest: manifest["tensors"][0].update(fields)


def halves(first: list[int], second: list[int], shift: int = 24) -> Change:
    """The first tensor in two pieces of two lines or so, at these offsets."""

    def change(manifest: Manifest) -> None:
        (whole,) = manifest["tensors"][0]["pieces"]
        pieces = [
            {**whole, "offset": offset, "shape": [3, 2], "bytes": 24, "start": whole["start"] + shift * i}
            for i, offset in enumerate((first, second))
        ]
        manifest["tensors"][0]["pieces"] = pieces

    return change


def swapped(*fields: str) -> Change:
    """What two pieces of one size say: the weights of both layers."""

    def change(manifest: Manifest) -> None:
        pieces = [tensor["pieces"][0] for tensor in manifest["tensors"] if tensor["name"] in ("0.weight", "1.weight")]
        for field in fields:
            pieces[0][field], pieces[1][field] = pieces[1][field], pieces[0][field]

    return change


def again(manifest: Manifest) -> None:
    manifest["tensors"].append(copy.deepcopy(manifest["tensors"][0]))


NAMES = [f"../{FILE}", f"/tmp/{FILE}", "/etc/passwd", "a.safetensors", "", "..", f"{FILE}\0", f"./{FILE}", "x" * 400]

VARIANTS: dict[str, Change] = {
    "a piece twice, another missing": halves([0, 0], [0, 0]),
    "pieces that overlap": halves([0, 0], [0, 1]),
    "pieces on the same bytes": halves([0, 0], [0, 2], shift=0),
    "pieces that the file does not have": halves([0, 0], [0, 2]),
    "no pieces": of_tensor(pieces=[]),
    "half of a tensor": of_piece(shape=[3, 2], bytes=24),
    "two tensors' bytes swapped": swapped("start", "crc32"),
    "two tensors' shapes swapped": swapped("shape"),
    "a tensor twice": again,
    "a tensor missing": without("tensors", 0),
    "another name": of_tensor(name="0.other"),
    "another kind": of_tensor(kind="optimizer"),
    "a kind that nobody knows": of_tensor(kind="code"),
    "another type": of_tensor(dtype="I32"),
    "another type of another size": of_tensor(dtype="F64"),
    "a type that nobody knows": of_tensor(dtype="PICKLE"),
    **{f"shape={shape}": of_tensor(shape=shape) for shape in ([4, 3], [12], [3, 5], [-3, -4], [1 << 70, 1], "x")},
    **{f"piece shape={shape}": of_piece(shape=shape) for shape in ([4, 3], [12], [-3, -4], [1 << 40, 1 << 40], None)},
    **{f"offset={offset}": of_piece(offset=offset) for offset in ([1, 0], [-1, 0], [0], [0, 0, 0], [1 << 70, 0], "0")},
    **{f"start={start}": of_piece(start=start) for start in (-1, 0, 8, 1 << 50, 1 << 70, "0")},
    **{f"bytes={num}": of_piece(bytes=num) for num in (-1, 0, 47, 49, 1 << 50)},
    **{f"crc32={crc}": of_piece(crc32=crc) for crc in (-1, 0, 1 << 32)},
    **{f"file={name[:20]!r}": of_piece(file=name) for name in NAMES},
    **{f"save={name[:20]!r}": put(name, "save") for name in ("../save-000001", "/tmp/save-1", "", "save-x", "save-9")},
    **{f"number={num}": put(num, "number") for num in (0, -1, 1 << 70, "1")},
    **{f"num_ranks={num}": put(num, "num_ranks") for num in (0, -1, 2, 1 << 70, None)},
    **{f"time={time}": put(time, "time") for time in (-1.0, 1e300)},
    **{f"version={version}": put(version, "version") for version in (0, 2, "1")},
    "another format": put("torchfleet checkpoint", "format"),
    "a name that is tied to nothing": put({"a": "b"}, "tied"),
    "a field that nobody knows": put(1, "more"),
    "a piece's field that nobody knows": of_piece(link="/etc/passwd"),
    **{f"without {name}": without(name) for name in ("save", "number", "tensors", "groups", "extra", "optimizer")},
    "without a piece's file": without("tensors", 0, "pieces", 0, "file"),
    "tensors are no list": put({}, "tensors"),
    "groups are no list": put("x", "groups"),
}  # fmt: skip


def test_the_model_itself_is_loaded(model: Path) -> None:
    other, optimizer = made(2)
    assert load(str(model), other, optimizer, [], None) == {"epoch": 3}
    assert torch.equal(other[0].weight, made(1)[0][0].weight)
    assert len(VARIANTS) >= 56


@each_of("name", VARIANTS)
def test_a_manifest_that_describes_no_model_is_refused_by_name(saved: Path, model: Path, name: str) -> None:
    manifest = json.loads(read_body(Storage(str(saved))))
    VARIANTS[name](manifest)
    write_body(Storage(str(model)), json.dumps(manifest).encode())
    refused(model)


def refused(model: Path, match: str = ".") -> None:
    other, optimizer = made(2)
    before = [copy.deepcopy(thing.state_dict()) for thing in (other, optimizer)]
    with pytest.raises(CheckpointError, match=match) as caught:
        load(str(model), other, optimizer, [], None)
    assert str(model) in str(caught.value), "the error names no file"
    found = [thing.state_dict() for thing in (other, optimizer)]
    assert all(torch.equal(found[0][name], value) for name, value in before[0].items())
    for number, state in before[1]["state"].items():
        assert all(torch.equal(found[1]["state"][number][name], value) for name, value in state.items())


@pytest.mark.parametrize("what", ["file", "folder"])
def test_links_that_lead_outside_are_refused(model: Path, tmp_path: Path, what: str) -> None:
    folder = model / read(Storage(str(model))).save
    place = folder if what == "folder" else folder / FILE
    os.rename(place, tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    refused(model)
