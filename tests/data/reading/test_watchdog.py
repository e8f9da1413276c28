"""Pipe commands die with their worker, however it dies; real processes, really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import processes
from support.paths import ROOT

pytestmark = pytest.mark.xdist_group("watchdog")  # each looks for processes of the others

NUM_FILES = 3
SLEEP = 1_000_000 + os.getpid()  # seconds: a number by which only those of these tests are found

SCRIPT = f"""
import sys, threading
from torchfleet.data.reading.pipe import piped

def read(path):
    for data in piped(path, "sleep {SLEEP} | cat; cat", False):
        pass

for path in sys.argv[1:]:
    threading.Thread(target=read, args=(path,), daemon=True).start()
while True:
    threading.Event().wait(1)
"""


def sleepers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["cmdline"] == ["sleep", str(SLEEP)] and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_for(num: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while len(sleepers()) != num:
        assert time.monotonic() < end, f"expected {num} commands, found {len(sleepers())}"
        time.sleep(0.02)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for number in range(NUM_FILES):
        (tmp_path / f"part-{number}").write_text("1 5\n")
    return [str(tmp_path / f"part-{number}") for number in range(NUM_FILES)]


@pytest.fixture(autouse=True)
def none_before_and_after() -> Iterator[None]:
    assert not sleepers()
    yield
    for process in sleepers():
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_commands_and_what_they_started_end_with_their_worker(files: list[str], number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with processes.interruptible():
        worker = subprocess.Popen([sys.executable, "-c", SCRIPT, *files], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(NUM_FILES)
        worker.send_signal(number)
        assert worker.wait(60) != 0
        wait_for(0)
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.slow
def test_a_forked_process_has_commands_of_its_own(files: list[str]) -> None:
    """Its parent's death is none of its business, and its own ends its commands alone."""
    code = f"""
import os, sys, time
from torchfleet.data.reading.pipe import piped

next(piped(sys.argv[1], "echo begun; cat", False))
if os.fork() == 0:
    command = piped(sys.argv[1], "echo begun; sleep {SLEEP}", False)
    next(command)
    time.sleep(60)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = psutil.Popen([sys.executable, "-c", code, files[0]], env=environment)
    child = None
    try:
        wait_for(1)
        child = next(c for c in parent.children() if "python" in c.name())
        parent.kill()
        parent.wait()
        time.sleep(0.5)
        assert len(sleepers()) == 1
        child.kill()
        wait_for(0)
    finally:
        for process in filter(None, (parent, child)):
            if process.is_running():
                process.kill()
