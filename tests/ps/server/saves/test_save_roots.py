"""Folders that arrive by message: a server writes below its roots, or where the sender has shown that it can write."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleets import WAIT, in_process
from support.messages import naming

from torchfleet.base.errors import CheckpointError, RoleError
from torchfleet.base.storage import Storage
from torchfleet.launch.server_launcher import roots
from torchfleet.ps.checkpoint.lock import RESERVED, reserve
from torchfleet.ps.server.saves.save_roots import open_folder, roots_of
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

SPEC = TableSpec("rows", dim=1, rule=Rule("sgd"))


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A set of references, whose templates older versions of fsspec rendered outside of any sandbox."""
    reached = tmp_path / "reached"
    template = "{{ cycler.__init__.__globals__.os.mkdir('" + str(reached) + "') }}"
    (tmp_path / "evil.json").write_text(
        json.dumps({"version": 1, "templates": {"u": template}, "refs": {"a": "{{u}}", "b": ["{{u}}/x", 0, 1]}})
    )
    return tmp_path


@pytest.mark.parametrize("roots", [None, ["/"], ["/", "memory://"]])
@pytest.mark.parametrize(
    "place",
    [
        "reference::{folder}/evil.json",
        "reference::file://{folder}/evil.json",
        "simplecache::reference::{folder}/evil.json",
        "reference://?fo={folder}/evil.json",
        "filecache::memory://model",
        "zip://a::{folder}/b.zip",
        "file://{folder}/a::b",
        "http://127.0.0.1:9/model",
        "github://a:b@c/model",
        "jupyter://x",
        "S3://bucket/model",
        "memory://a/../../b",
    ],
)
def test_chains_and_stores_that_were_not_allowed_are_refused_and_run_nothing(
    evil: Path, place: str, roots: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_SAVE_ROOTS", raising=False)
    opened: list[Any] = []
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *args, **more: opened.append(args))
    with in_process(1) as fleet:
        fleet.servers[0].state.saves.roots = roots_of(roots)
        client = fleet.client()
        client.create_table(SPEC)
        client.pull("rows", np.arange(3)).result()
        with pytest.raises(CheckpointError):
            client.save(place.format(folder=evil), "save-000001", True, WAIT)
    assert not opened
    assert os.listdir(evil) == ["evil.json"]


def test_without_roots_a_server_writes_only_where_the_sender_has_made_the_folder(tmp_path: Path) -> None:
    with in_process(1) as fleet:
        client = fleet.client()
        client.create_table(SPEC)
        dirname, token = str(tmp_path / "model"), secrets.randbits(60)
        with pytest.raises(CheckpointError, match=naming("save-000001", RESERVED)):
            client.save(dirname, "save-000001", True, WAIT, token=token)
        assert not os.path.exists(dirname)
        token += 2  # a repeat of the request gets the same answer
        with reserve(Storage(dirname), 1, token) as held:
            with pytest.raises(CheckpointError, match="save-000001"):
                client.save(dirname, held.folder, True, WAIT, token=token + 1)
            assert os.listdir(tmp_path / "model" / held.folder) == [RESERVED]
            assert len(client.save(dirname, held.folder, True, WAIT, token=token)) == 1
            held.release()
        assert len(os.listdir(tmp_path / "model" / held.folder)) == 1


def test_a_folder_of_another_user_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path / "model"))
    with reserve(storage, 1, 7) as held:
        open_folder((), storage.path, held.folder, 7)
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(CheckpointError, match="user"):
            open_folder((), storage.path, held.folder, 7)
        open_folder(roots_of([str(tmp_path)]), storage.path, held.folder, 7)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "a.tmp").symlink_to(tmp_path / "mine")
    Storage(str(tmp_path)).write("a", [b"new"])
    assert ((tmp_path / "mine").read_text(), (tmp_path / "a").read_bytes()) == ("mine", b"new")


def test_with_roots_only_what_lies_below_them_is_written_and_links_are_followed_first(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "root-2"
    for folder in (root, other):
        folder.mkdir()
    (root / "link").symlink_to(other)
    (root / "model").mkdir()
    (root / "model" / "save-000002").symlink_to(other)
    roots = roots_of([str(root), "memory://models"])
    assert open_folder(roots, str(root), "save-000001", 1).storage.path == str(root)
    assert open_folder(roots, f"file://{root}/a", "save-000001", 1).storage.path == f"{root}/a"
    open_folder(roots, "memory://models/a", "save-000001", 1)
    for place in (other, root / "link", root / ".." / "root-2", root / "link" / ".." / "root-2", tmp_path):
        with pytest.raises(CheckpointError, match=naming(os.path.realpath(place))):
            open_folder(roots, str(place), "save-000001", 1)
    with pytest.raises(CheckpointError, match=naming("memory://models2/a")):
        open_folder(roots, "memory://models2/a", "save-000001", 1)
    with pytest.raises(CheckpointError, match="save-000002"):
        open_folder(roots, str(root / "model"), "save-000002", 1)
    for place in ("", "model", "a\0b", "x" * 5000):
        with pytest.raises(CheckpointError):
            open_folder(roots, place, "save-000001", 1)


def test_roots_come_from_the_command_line_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SAVE_ROOTS", "/data, s3://bucket/models,")
    assert roots_of(None) == ("/data", "s3://bucket/models")
    assert roots_of(["here"]) == (os.path.abspath("here"),)
    assert roots(["here", "s3://b"]) == {"FLEET_SAVE_ROOTS": f"{os.path.abspath('here')},s3://b"}
    assert roots(None) == {}
    with pytest.raises(RoleError, match=naming("--save_root", "'a,b'")):
        roots(["a,b"])
