"""Logs: two files of a bounded size, whole to the last byte, and no reason for a process to end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from support.messages import names

from torchfleet.base.monitor.log_file import LogFile, before, last_bytes
from torchfleet.launch.job_spec import Task
from torchfleet.launch.processes import Process


def test_a_full_log_is_put_aside_and_only_one(tmp_path: Path) -> None:
    log = tmp_path / "workerlog.0"
    with contextlib.closing(LogFile(log, False, 100, print)) as file:
        for i in range(50):
            file.write(b"%09d\n" % i)
            assert log.stat().st_size <= 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["workerlog.0", "workerlog.0.1"]
    assert before(log).read_bytes() + log.read_bytes() == b"".join(b"%09d\n" % i for i in range(30, 50))
    assert last_bytes(log, 25) == b"0047\n000000048\n000000049\n"
    assert len(last_bytes(log, 150)) == 150
    assert len(last_bytes(log, 10_000)) == 200


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "workerlog.0"
    for text in (b"one\n", b"two\n"):
        with contextlib.closing(LogFile(log, True, 6, print)) as file:
            file.write(text)
    assert (before(log).read_bytes(), log.read_bytes()) == (b"one\n", b"two\n")


def test_a_process_that_is_started_again_begins_a_line(tmp_path: Path) -> None:
    log = tmp_path / "workerlog.0"
    for text in (b"one\n", b"killed in the midd", b"three\n"):
        with contextlib.closing(LogFile(log, True, 1000, print)) as file:
            file.write(text)
    assert log.read_bytes() == b"one\nkilled in the midd\nthree\n"


def test_a_disk_that_takes_no_more_is_told_once_and_stops_nobody(tmp_path: Path) -> None:
    log, told = tmp_path / "workerlog.0", []
    log.symlink_to("/dev/full")
    with contextlib.closing(LogFile(log, False, 1 << 20, told.append)) as file:
        for _ in range(3):
            file.write(b"lost\n")
    (text,) = told
    assert names(text, log)
    assert os.strerror(28) in text


def test_the_logs_of_a_process_are_bounded_and_all_of_it_is_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    code = "for i in range(3000): print(f'line {i:04}')\nprint('x' * 200_000, end='')"
    process = Process(Task("worker", 0), [sys.executable, "-c", code], tmp_path, shown.append, True, False, 10_000)
    deadline = time.monotonic() + 60
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.last_lines(1)[0].endswith("xxx")
    process.close()
    assert shown[:3000] == [f"[worker 0] line {i:04}" for i in range(3000)]
    assert sum(line.count("x") for line in shown) == 200_000, "a line that is too long comes in pieces"
    assert max(map(len, shown)) < 140_000
    assert len(list(tmp_path.iterdir())) == 2
    assert process.log.stat().st_size <= 1 << 16
