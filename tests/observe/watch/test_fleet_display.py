"""The display of a real job: at a terminal, and behind a reader that goes away."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.extras import Late
from support.messages import lines_naming
from support.paths import ROOT
from support.scripts.launching import SOON, STAND_IN, TINY, clean_environment, run_dir

from torchfleet.observe.watch.history import HistoryReader

pyte = Late("pyte")


def read_all(descriptor: int, seconds: float, awaited: bytes, then: Callable[[], object]) -> str:
    """What comes until the other side is closed. `then` is called when the first `awaited` has come."""
    found, deadline = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):  # of a terminal whose other side is closed
        while time.monotonic() < deadline:
            if select.select([descriptor], [], [], 1.0)[0]:
                data = os.read(descriptor, 65536)
                if not data:
                    break
                if awaited not in found and awaited in found + data:
                    then()
                found += data
    return found.decode()


@pytest.mark.slow
def test_a_fleet_at_a_terminal_is_shown_with_the_numbers_that_its_record_has(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(tmp_path), "--worker_num", "2"]
    shown = tmp_path / "shown"
    command += [TINY, "--mode", "async", "--steps", "100000", "--pause", "0.05", "--until", str(shown)]
    environment = clean_environment(TERM="xterm-256color", PYTHONPATH=str(ROOT))
    with processes.Popen(command, env=environment, stdout=theirs, stdin=theirs, stderr=theirs) as job:
        os.close(theirs)
        written = read_all(ours, 120, b"samples/s (mean", shown.touch)
        assert job.wait(SOON) == 0
    os.close(ours)
    frames = written.split("\x1b[2K\x1b[1A")  # a new drawing begins with going up
    screen = pyte.HistoryScreen(120, 40, history=5000)
    stream, seen = pyte.Stream(screen), []
    for frame in frames:
        stream.feed(frame + "\x1b[2K\x1b[1A")
        seen.append("\n".join(screen.display))
    assert any("async  1 server × 2 workers" in text and "samples/s (mean" in text for text in seen)
    end = "\n".join(screen.display)
    assert "finished" in end
    assert "async  1 server" not in end  # what changed in place is gone
    last = {}
    for record in HistoryReader(run_dir(tmp_path)).records():
        if record["kind"] == "role":
            last[record["key"]] = record["status"]
    total = sum(status["samples"] for key, status in last.items() if key.startswith("worker"))
    assert lines_naming(end, "[fleetrun]", f"{total:,}", "samples")
    assert min(last["worker.0"]["steps"], last["worker.1"]["steps"]) > 0
    assert last["server.0"]["workers_joined"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "log_format"), [("reader leaves", "text"), ("closed", "text"), ("reader leaves", "json")]
)
def test_the_job_goes_on_when_nobody_reads_what_is_shown(tmp_path: Path, how: str, log_format: str) -> None:
    log_dir, nobody_reads, done = tmp_path / "log", tmp_path / "nobody reads", tmp_path / "done"
    command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(log_dir), "--log_format", log_format]
    worker = f"async,until:{nobody_reads},sleep:1,leave,touch:{done}"
    command += [STAND_IN, f"until:{nobody_reads},until:{done}", worker]
    popen: Any = processes.Popen
    if how == "closed":
        command, popen = ["sh", "-c", 'exec "$@" >&-', "sh", *command], subprocess.Popen
    with popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        if how == "reader leaves":
            assert b"logs in" in job.stdout.readline()
        job.stdout.close()
        nobody_reads.touch()
        assert job.wait(SOON) == 0
        assert job.stderr is not None
        assert b"Error" not in job.stderr.read()
    lines = (run_dir(log_dir) / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["finished"] is True
