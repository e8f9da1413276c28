"""Folders of one user: made private, and refused where others can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.messages import naming

from torchfleet.base.errors import SecurityError
from torchfleet.base.ownership import check_own, make_own


@pytest.mark.parametrize("mask", [0o000, 0o022], ids=oct)
def test_a_new_folder_is_for_its_user_alone_whatever_the_mask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        make_own(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    make_own(tmp_path / "new")  # again


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, 0o720], ids=oct)
def test_a_folder_in_which_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(SecurityError, match=naming(f"{mode:o}", "chmod go-w")):
        check_own(tmp_path / "open")


def test_one_that_others_can_only_read_is_taken(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    check_own(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(SecurityError, match=naming(12345, 0)):
        make_own(tmp_path / "theirs")


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "file").touch(0o600)
    for name in ("link", "file"):
        with pytest.raises(SecurityError, match=naming(tmp_path / name)):
            check_own(tmp_path / name)
