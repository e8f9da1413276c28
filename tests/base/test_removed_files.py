"""Folders with large files: their names are gone at once, and their blocks when a thread has closed them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from torchfleet.base import removed_files
from torchfleet.base.storage import Storage

LARGE = 1 << 24


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are closed once it is set."""
    opened = threading.Event()
    really = removed_files._close

    def close(files: list[int]) -> None:
        assert opened.wait(60)
        really(files)

    monkeypatch.setattr(removed_files, "_close", close)
    return opened


def made(folder: Path, *sizes: int) -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        with open(folder / str(number), "wb") as file:
            file.truncate(size)
    return folder


def still_open(folder: Path) -> list[str]:
    """Names of files below the folder that this process has open."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:  # another thread has closed it since
            continue
    return sorted(target for target in targets if target.startswith(f"{folder}/"))


def test_names_go_at_once_and_blocks_when_a_thread_has_closed_the_files(tmp_path: Path, gate: threading.Event) -> None:
    folder = made(tmp_path / "save", LARGE, LARGE - 1, LARGE + 5, 0)
    made(folder / "inner", LARGE)
    Storage(str(tmp_path)).remove_folder("save")
    assert not folder.exists()
    assert still_open(folder) == [f"{folder}/{name} (deleted)" for name in ("0", "2", "inner/0")]
    gate.set()
    removed_files.wait_until_freed()
    assert still_open(folder) == []


def test_a_large_file_is_written_when_blocks_of_removed_ones_are_free(tmp_path: Path, gate: threading.Event) -> None:
    storage, data = Storage(str(tmp_path)), bytes(LARGE)
    storage.write("old/file", [data])
    storage.remove_folder("old")
    storage.write("small", [b"1"])  # does not wait
    writing = threading.Thread(target=storage.write, args=("new/file", [data]))
    writing.start()
    writing.join(0.2)
    assert writing.is_alive()
    assert not (tmp_path / "new").exists()
    gate.set()
    writing.join(60)
    assert storage.read("new/file") == data


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = made(tmp_path / "outside", LARGE)
    folder = made(tmp_path / "save", LARGE)
    (folder / "link").symlink_to(outside / "0")
    (folder / "all").symlink_to(outside)
    removed_files.remove_folder(str(folder))
    removed_files.remove_folder(str(folder))  # not there any more
    assert not folder.exists()
    assert (outside / "0").stat().st_size == LARGE


def test_what_cannot_be_opened_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "save", *[LARGE] * 70)  # more than are held open
    removed_files.remove_folder(str(folder))
    assert not folder.exists()
    folder = made(tmp_path / "other", LARGE)

    def refused(*_: object) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(removed_files.os, "open", refused)
    assert removed_files._opened(str(folder)) == []
    monkeypatch.undo()
    removed_files.remove_folder(str(folder))
    assert not folder.exists()
    removed_files.wait_until_freed()
    assert still_open(folder) == []
