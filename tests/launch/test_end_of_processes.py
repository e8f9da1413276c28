"""How the processes of a job are ended together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripts.launching import START, wait_until

from torchfleet.launch import processes
from torchfleet.launch.job_spec import Task
from torchfleet.launch.processes import Process, end_all

NUM = 4
# The child leaves the process group, so that no signal to the group reaches it; says so; and keeps the output open.
KEEPING = """setsid sh -c 'echo $$ > "$0.new"; mv "$0.new" "$0"; exec sleep 600' "$0" & wait"""


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[list[Path]]:
    """Files with the ids of processes that keep an output open; they are killed afterwards."""
    paths = [tmp_path / f"keeper.{index}" for index in range(NUM)]
    yield paths
    for path in paths:
        if path.exists():
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_outputs_that_stay_open_delay_the_end_of_a_job_once(
    tmp_path: Path, keepers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_READING", 2.0)
    started = [
        Process(Task("worker", index), ["/bin/sh", "-c", KEEPING, str(path)], tmp_path, print)
        for index, path in enumerate(keepers)
    ]
    wait_until(lambda: all(path.exists() for path in keepers), START, "keepers")
    readers = [process._reader for process in started]
    waits: list[Any] = []  # time-outs, not times: what a busy machine adds to a wait is in none of them
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread in readers:
            waits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    end_all(started)
    monkeypatch.undo()
    assert len(waits) == NUM
    assert max(waits) <= 2.0
    assert sum(waits) < 2.0 * NUM - 1  # one after the other they would be 2 s each
    assert all(process.returncode == -signal.SIGTERM for process in started)
    assert all(reader is not None and reader.is_alive() for reader in readers)  # the outputs are still open
    os.kill(int(keepers[0].read_text()), 0)
