"""Syncing the log beside writing it: what waits for the disk, and what does not."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.scripts.launching import SOON, wait_until

from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_entry import Entry, Kind, encode_entry
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.log.log_writer import LogWriter

ENTRY = encode_entry(Entry(Kind.TICK, 1))
LARGE = encode_entry(Entry(Kind.REQUEST, 1, frames=[bytes(1 << 16)]))


def begun(path: Path) -> LogFolder:
    folder = LogFolder(path)
    folder.begin("run")
    folder.begin_segment()
    return folder


@pytest.mark.parametrize("fsync_ms", [1.0, 0.0])
def test_only_without_a_delay_an_entry_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync_ms: float
) -> None:
    folder, entered, may_go_on = begun(tmp_path / "log"), threading.Event(), threading.Event()

    def slow_sync(file: int) -> None:
        entered.set()
        assert may_go_on.wait(SOON)

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    writer = LogWriter(folder, 0, fsync_ms, lambda: None)
    writer.append(1, ENTRY)
    writer.flush()
    assert entered.wait(SOON)
    writer.append(2, ENTRY)
    writer.flush()
    if fsync_ms:
        wait_until(lambda: writer.confirmed() == 2, SOON, "confirmation while the disk is busy")
        assert folder.num_synced == 0
    else:
        assert writer.confirmed() == 0
    may_go_on.set()
    writer.close()
    assert writer.confirmed() == 2
    assert folder.num_synced == folder.num_bytes > 0
    folder.close()


def test_entries_that_come_while_the_thread_writes_are_its_next_batch(tmp_path: Path) -> None:
    folder, entered, may_go_on = begun(tmp_path / "log"), threading.Event(), threading.Event()
    write, num_writes = folder.write, 0

    def slow_write(buffers: Sequence[Frame]) -> int:
        nonlocal num_writes
        num_writes += 1
        entered.set()
        assert may_go_on.wait(SOON)
        return write(buffers)

    folder.write = slow_write  # type: ignore[method-assign]
    writer = LogWriter(folder, 0, 1.0, lambda: None)
    writer.append(1, LARGE)
    assert entered.wait(SOON), "a large entry is written when it comes"
    for index in (2, 3, 4):
        writer.append(index, LARGE)
    assert writer.confirmed() == 0
    may_go_on.set()
    wait_until(lambda: writer.confirmed() == 4, SOON, "all entries are written")
    assert num_writes == 2
    writer.close()
    folder.close()


def test_small_entries_are_put_off_for_a_moment_and_written_together(tmp_path: Path) -> None:
    folder = begun(tmp_path / "log")
    write, num_writes = folder.write, 0

    def counted_write(buffers: Sequence[Frame]) -> int:
        nonlocal num_writes
        num_writes += 1
        return write(buffers)

    folder.write = counted_write  # type: ignore[method-assign]
    writer = LogWriter(folder, 0, 1.0, lambda: None)
    for index in (1, 2, 3):
        writer.append(index, ENTRY)
        writer.flush(after=1e6)
    assert not writer.is_idle
    assert writer.confirmed() == 0
    writer.flush(after=0.0)
    wait_until(lambda: writer.confirmed() == 3, SOON, "all entries are written")
    writer.append(4, ENTRY)
    wait_until(lambda: bool(writer.flush(after=0.001) or writer.confirmed() == 4), SOON, "the moment is over")
    assert num_writes == 2
    writer.append(5, ENTRY)
    writer.close()
    assert writer.confirmed() == 5, "a writer that is closed puts nothing off"
    folder.close()


def test_a_writer_that_is_idle_has_confirmed_all(tmp_path: Path) -> None:
    class LateWriter(LogWriter):
        """Its thread stands still before it confirms."""

        def __setattr__(self, name: str, value: object) -> None:
            if name == "_confirmed":
                time.sleep(0.1)
            super().__setattr__(name, value)

    folder = begun(tmp_path / "log")
    writer = LateWriter(folder, 0, 1.0, lambda: None)
    writer.append(1, ENTRY)
    writer.flush()
    wait_until(lambda: writer.is_idle, SOON, "all entries are written")
    assert writer.confirmed() == 1
    writer.close()
    folder.close()


@pytest.mark.parametrize("fsync_ms", [1.0, 0.0])
def test_only_without_a_delay_an_entry_waits_until_old_segments_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync_ms: float
) -> None:
    folder, entered, may_go_on, unlink = begun(tmp_path / "log"), threading.Event(), threading.Event(), os.unlink
    folder.forget_before_last()
    writer = LogWriter(folder, 0, fsync_ms, lambda: None)

    def slow_unlink(path: Path) -> None:
        if path.name.startswith("segment-"):
            entered.set()
            assert may_go_on.wait(SOON)
        unlink(path)

    monkeypatch.setattr(os, "unlink", slow_unlink)
    writer.begin_segment()
    writer.end_copy()
    assert entered.wait(SOON)
    writer.append(1, LARGE)
    if fsync_ms:
        wait_until(lambda: writer.confirmed() == 1, SOON, "confirmation while a segment is being removed")
    else:
        assert writer.confirmed() == 0
    assert len(list((tmp_path / "log").glob("segment-*"))) == 2
    may_go_on.set()
    writer.close()
    assert writer.confirmed() == 1
    assert [path.name for path in (tmp_path / "log").glob("segment-*")] == ["segment-00000002.log"]
    folder.close()


def test_a_segment_that_cannot_be_removed_is_a_failure_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "log")
    folder.forget_before_last()
    writer = LogWriter(folder, 0, 1.0, lambda: None)
    writer.begin_segment()

    def refused() -> None:
        raise OSError(errno.EIO, "a test")

    monkeypatch.setattr(folder, "remove_forgotten", refused)
    writer.end_copy()
    wait_until(lambda: "a test" in writer.failure, SOON, "the log says that it has failed")
    assert str(tmp_path) in writer.trouble()
    writer.close()
    folder.close()


def test_what_is_synced_is_counted_by_segment(tmp_path: Path) -> None:
    folder = begun(tmp_path / "log")
    folder.sync_behind()
    folder.write([b"12345678"])
    assert folder.num_synced == 0
    folder.sync_behind()
    assert folder.num_synced == 8
    folder.forget_before_last()
    folder.begin_segment()
    assert folder.num_synced == 0
    folder.close()


def test_a_segment_that_was_removed_is_missed(tmp_path: Path) -> None:
    folder = begun(tmp_path / "log")
    folder.write([b"12345678"])
    (segment,) = (tmp_path / "log").glob("segment-*")
    segment.unlink()
    with pytest.raises(FileNotFoundError):
        folder.sync_behind()
    with pytest.raises(FileNotFoundError):
        folder.sync()
    folder.close()


def cached_pages(path: Path) -> int:
    """How many pages of a file are in memory, by the kernel's own count."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), len(mapped), found) == 0
        return sum(each & 1 for each in found)


def keeps_pages(path: Path) -> bool:
    """Whether the kernel takes no advice about a file here."""
    with open(path, "wb") as file:
        file.write(bytes(100 * mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_pages(path) > 0


@pytest.mark.parametrize("sync", [LogFolder.sync, LogFolder.sync_behind])
def test_what_is_on_the_disk_takes_no_memory(sync: Callable[[LogFolder], None]) -> None:
    with tempfile.TemporaryDirectory() as place:  # not the other tests' folder, which is in memory
        if keeps_pages(Path(place) / "probe"):
            pytest.skip("this file system keeps all pages, as one in memory does")
        write_and_sync(Path(place), sync)


def write_and_sync(place: Path, sync: Callable[[LogFolder], None]) -> None:
    folder = begun(place / "log")
    (path,) = (place / "log").glob("segment-*")
    for _ in range(3):
        folder.write([bytes(100 * mmap.PAGESIZE), b"12345678"])
        sync(folder)
    assert cached_pages(path) < 150, "the last ones may stay, where the kernel has pages in larger pieces"
    assert folder.num_synced == 3 * (100 * mmap.PAGESIZE + 8)
    folder.close()
