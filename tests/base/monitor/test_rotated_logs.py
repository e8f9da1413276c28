"""Logs of processes that others rotate while they are written: nothing is lost, and no file has a hole."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchfleet.base.monitor.log_file import LogFile


def failed(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize("append", [False, True])
def test_a_log_that_is_copied_and_truncated_goes_on_at_its_beginning(tmp_path: Path, append: bool) -> None:
    path = tmp_path / "workerlog.0"
    log = LogFile(path, append, 100, failed)
    log.write(b"a" * 90)
    with path.open("r+b") as file:
        file.truncate(0)
    log.write(b"b" * 90)  # fits: the size is that of the file, not of what was written
    log.close()
    assert path.read_bytes() == b"b" * 90
    assert not (tmp_path / "workerlog.0.1").exists()


@pytest.mark.parametrize("how", ["rename", "remove"])
def test_a_log_that_is_renamed_or_removed_goes_on_under_its_name(tmp_path: Path, how: str) -> None:
    path, rotated = tmp_path / "workerlog.0", tmp_path / "rotated"
    log = LogFile(path, False, 1000, failed)
    log.write(b"a")
    if how == "rename":
        path.rename(rotated)
    else:
        path.unlink()
    log.write(b"b")
    log.write(b"c")
    log.close()
    assert path.read_bytes() == b"bc"
    assert how == "remove" or rotated.read_bytes() == b"a"


def test_a_log_that_another_process_has_made_anew_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    log = LogFile(path, False, 1000, failed)
    log.write(b"a")
    path.rename(tmp_path / "rotated")
    path.write_bytes(b"made by logrotate\n")
    log.write(b"b")
    log.close()
    assert path.read_bytes() == b"made by logrotate\nb"
