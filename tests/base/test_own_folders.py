"""Temporary folders of this user: removed at the end, and by the next process if theirs was killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from torchfleet.base.errors import SecurityError
from torchfleet.base.own_folders import own_folder, user_folder

HOLD = """
import sys, time
from torchfleet.base.own_folders import own_folder
with own_folder("held") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_in_use_stays() -> None:
    holders = [subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        killed, living = (Path(holder.stdout.readline().strip()) for holder in holders)  # type: ignore[union-attr]
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait(60)
        assert (killed / "file").exists()
        with own_folder("next") as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert not killed.exists()
            assert (living / "file").exists()
        assert not folder.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate(timeout=60)


def test_links_are_not_followed(temporary: Path) -> None:
    (temporary / "kept-12345678").mkdir()
    (temporary / "kept-12345678" / "file").touch()
    user_folder().mkdir(0o700)
    (user_folder() / "link-12345678").symlink_to(temporary / "kept-12345678")
    (user_folder() / "dead-12345678").mkdir()
    (user_folder() / "dead-12345678" / "link").symlink_to(temporary / "kept-12345678")
    with own_folder("next"):
        assert not (user_folder() / "dead-12345678").exists()
    assert (temporary / "kept-12345678" / "file").exists()


def test_a_folder_of_others_is_refused() -> None:
    user_folder().mkdir()
    user_folder().chmod(0o777)
    with pytest.raises(SecurityError), own_folder("next"):
        pass
    assert os.listdir(user_folder()) == []
