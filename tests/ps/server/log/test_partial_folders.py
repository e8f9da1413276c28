"""Log folders that no crash leaves: files are missing, are links or folders, cannot be read, are of another server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.logged_work import Work, make_server
from support.messages import naming

from torchfleet.base.errors import LogError
from torchfleet.ps.server.log.durable_server import Durability, begin_log, go_on
from torchfleet.ps.server.log.log_start import Start, read_start, write_start

Change = Callable[[Path], None]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with segments 2 and 3, of which both are needed."""
    folder = tmp_path / "log"
    durable = begin_log(make_server(), Durability(folder, run="a"))
    Work(durable, 1).steps(10)
    durable._cut()
    durable._wait_for_copy()
    Work(durable, 2).steps(10)
    durable._writer.begin_segment()
    durable.close()
    start = read_start(folder)
    assert start == Start(2, 3, "a", salt=start.salt)
    return folder


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def made_folder(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def made_link(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return change


def lost_link(folder: Path) -> None:
    made_link("start")(folder)
    (folder.parent / "start").unlink()


def emptied(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes(b"")


def with_pipe(folder: Path) -> None:
    (folder / "start").unlink()
    os.mkfifo(folder / "start")


def with_number(folder: Path) -> None:
    (folder / "start").write_text("2\n")


def flipped(folder: Path) -> None:
    data = (folder / "start").read_bytes()
    (folder / "start").write_bytes(data.replace(b'"a"', b'"b"'))


def with_later(folder: Path) -> None:
    shutil.copy(folder / "segment-00000002.log", folder / "segment-00000004.log")


def begun_again(folder: Path) -> None:
    write_start(folder, Start(0, 0, "a"))


PARTIAL: dict[str, tuple[Change, str]] = {
    "no start": (removed("start"), "start"),
    "start is a folder": (made_folder("start"), "start"),
    "start is a link": (made_link("start"), "start"),
    "start is a link to nothing": (lost_link, "start"),
    "start is a pipe": (with_pipe, "start"),
    "start is empty": (emptied("start"), "start"),
    "start is of another version": (with_number, "start"),
    "a bit of start is flipped": (flipped, "start"),
    "start says that nothing is whole": (begun_again, "segment-00000002.log"),
    "no first segment": (removed("segment-00000002.log"), "2"),
    "no last segment": (removed("segment-00000003.log"), "3"),
    "the first segment is empty": (emptied("segment-00000002.log"), "log"),
    "a segment is a folder": (made_folder("segment-00000002.log"), "segment-00000002.log"),
    "a segment is a link": (made_link("segment-00000002.log"), "segment-00000002.log"),
    "the last segment is a folder": (made_folder("segment-00000003.log"), "segment-00000003.log"),
    "a segment too many": (with_later, "segment-00000004.log"),
    "start and over": (lambda folder: (folder / "over").touch(), "over"),
    "the lock is a folder": (made_folder("lock"), "lock"),
    "the lock is a link": (made_link("lock"), "lock"),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_a_folder_that_no_crash_leaves_is_refused_by_name_and_stays_as_it_is(log: Path, name: str) -> None:
    change, named = PARTIAL[name]
    change(log)
    before = contents(log)
    for _ in range(2):
        with pytest.raises(LogError, match=naming(log, named)):
            go_on(make_server(), Durability(log, run="a"), print)
        with pytest.raises(LogError, match=naming(log)):
            begin_log(make_server(), Durability(log, run="a"))
        assert contents(log) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user who may not read the files")
@pytest.mark.parametrize("name", ["start", "segment-00000002.log", "segment-00000003.log", "lock"])
def test_a_file_that_may_not_be_read_is_named_and_nothing_is_removed(log: Path, name: str) -> None:
    (log / name).chmod(0)
    for path in (log.parent, log, *log.iterdir()):
        os.chown(path, 65534, 65534)
    before = contents(log)
    os.seteuid(65534)
    try:
        with pytest.raises(LogError, match=naming(log / name)):
            go_on(make_server(), Durability(log, run="a"), print)
    finally:
        os.seteuid(0)
    assert contents(log) == before


def test_a_log_is_not_begun_where_another_server_has_begun_one_meanwhile(tmp_path: Path) -> None:
    assert go_on(make_server(), Durability(tmp_path), print) is None
    durable = begin_log(make_server(), Durability(tmp_path))
    Work(durable, 1).steps(5)
    durable.close()
    before = contents(tmp_path)
    with pytest.raises(LogError, match=naming(tmp_path)):
        begin_log(make_server(), Durability(tmp_path))
    assert contents(tmp_path) == before


def test_a_server_whose_segment_is_removed_promises_nothing_more(tmp_path: Path) -> None:
    durable = begin_log(make_server(), Durability(tmp_path, 0.0))
    (tmp_path / "segment-00000001.log").unlink()
    confirmed = durable.confirmed
    Work(durable, 1)  # makes tables, and joins
    durable.rest()
    durable._writer._threads.join()
    assert str(tmp_path) in durable._writer.trouble()
    assert durable.confirmed == confirmed
    with pytest.raises(LogError, match=naming(tmp_path)):
        durable.tick(0.0)


def contents(folder: Path) -> dict[str, bytes]:
    """Names, what is a link, and what is in the files."""
    found = sorted(folder.iterdir())
    return {f"{path.name} {path.is_symlink()}": path.read_bytes() if path.is_file() else b"" for path in found}
