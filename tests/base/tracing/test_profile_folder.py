"""Requests for a profile: whose are followed, and what happens when the one that asked is gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from torchfleet.base import step_tracing
from torchfleet.base.errors import FleetError
from torchfleet.base.step_tracing import StepTracing
from torchfleet.base.tracing import profile_folder
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import Begin, ProfileFolder, ProfileRequest, new_request, write
from torchfleet.observe.profile.profile_command import running_folder
from torchfleet.ps.server import server_tracing
from torchfleet.ps.server.server_tracing import ServerTracing, TracedRequests


def asked(root: Path, steps: int = 3) -> ProfileRequest:
    request = new_request(steps, 0, False)
    (root / request.id).mkdir()
    write(root / "request.json", request)
    return request


def test_a_request_is_a_plain_file_of_our_own_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "request.json"
    request = asked(tmp_path)
    assert ProfileFolder(tmp_path).look() == request
    monkeypatch.setattr(profile_folder.os, "geteuid", lambda: 4_000_000)
    is_root = path.stat().st_uid == 0
    assert (ProfileFolder(tmp_path).look() is None) == (not is_root)
    monkeypatch.undo()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert ProfileFolder(tmp_path).look() is None
    path.unlink()
    os.mkfifo(path)  # to read it would wait for a writer
    assert ProfileFolder(tmp_path).look() is None


def test_a_request_for_very_many_steps_is_none(tmp_path: Path) -> None:
    asked(tmp_path, profile_folder.MOST_STEPS + 1)
    assert ProfileFolder(tmp_path).look() is None


def test_what_is_written_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f"a.{os.getpid()}.new").symlink_to(victim)
    write(tmp_path / "a", Begin(1))
    assert victim.read_text() == "mine"
    assert msgspec.json.decode((tmp_path / "a").read_bytes()) == {"at": 1}


def test_a_second_profile_of_a_running_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".status.worker.0").touch()
    root = running_folder(tmp_path)
    root.mkdir()
    asked(root)
    with pytest.raises(FleetError, match="profile"):
        running_folder(tmp_path)


def test_a_process_is_free_for_the_next_profile_when_a_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (profile_folder, step_tracing, server_tracing):
        monkeypatch.setattr(module, "LOOK", 0.0)
    model = torch.nn.Linear(1, 1)
    worker = StepTracing(ProcessName("worker", 0, 1, 1, 1), model, [], ProfileFolder(tmp_path), 0)
    server = ServerTracing(ProcessName("server", 0, 1, 1, 2), TracedRequests(), ProfileFolder(tmp_path), 0)
    for has_begun in (False, True, False):
        request = asked(tmp_path, steps=1000)
        folder = tmp_path / request.id
        worker.step_made()
        server.look()
        assert {path.name for path in folder.iterdir()} == {"worker.0.here", "server.0.here"}
        monkeypatch.setattr(step_tracing, "_BEGIN_LOOK", 0.0)
        if has_begun:
            write(folder / "begin.json", Begin(0))
        for _ in range(3):
            worker.step_made()
        (tmp_path / "request.json").unlink()
        shutil.rmtree(folder)
        worker.step_made()
        server.look()
    worker.close()
    server.close()
