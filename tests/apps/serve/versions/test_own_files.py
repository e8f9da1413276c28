"""The files of a version are in its own folder: no links, no other folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchfleet.apps.serve.versions.level_file import open_own
from torchfleet.apps.serve.versions.version_description import CURRENT, read_current
from torchfleet.base.errors import CheckpointError


def test_a_file_of_a_version_may_not_be_elsewhere(tmp_path: Path) -> None:
    folder, other = tmp_path / "versions", tmp_path / "other"
    folder.mkdir()
    other.write_bytes(b"{}")
    (folder / "own").write_bytes(b"own")
    (folder / "link").symlink_to(other)
    (folder / CURRENT).symlink_to(other)
    with open_own(folder, "own") as file:
        assert file.read() == b"own"
    for name in ("link", "../other"):
        with pytest.raises(CheckpointError):
            open_own(folder, name)
    with pytest.raises(CheckpointError):
        read_current(folder)
    with pytest.raises(FileNotFoundError):
        open_own(folder, "none")
