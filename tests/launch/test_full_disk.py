"""A log disk that is full costs lines of logs, and no process."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from support.messages import lines_naming, names

from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.status import StatusFile
from torchfleet.launch.job_spec import Task
from torchfleet.launch.processes import Process

SCRIPT = """
import sys
for number in range(2000):
    print("line", number, flush=True)
    print("error", number, file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_whose_log_is_on_a_full_disk_goes_on_and_one_line_says_so(tmp_path: Path, is_first: bool) -> None:
    (tmp_path / "workerlog.0").symlink_to("/dev/full")
    told: list[str] = []
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "end")]
    process = Process(Task("worker", 0), command, tmp_path, told.append, echo=is_first)
    try:
        assert process._process.wait(60) == 0
    finally:
        process.close()
    assert (tmp_path / "end").read_text() == "done"
    (line,) = (text for text in told if text.startswith("[fleetrun]"))
    assert names(line, "workerlog.0", "[Errno 28] No space left on device")
    assert len(told) == (4001 if is_first else 1)


def test_all_output_of_a_process_is_in_its_log(tmp_path: Path) -> None:
    process = Process(Task("server", 3), [sys.executable, "-c", SCRIPT, str(tmp_path / "end")], tmp_path, print)
    try:
        assert process._process.wait(60) == 0
    finally:
        process.close()
    lines = (tmp_path / "serverlog.3").read_text().splitlines()
    assert [line for line in lines if line.startswith("line")] == [f"line {number}" for number in range(2000)]
    assert len(lines) == 4000


def test_a_status_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "status.part").symlink_to("/dev/full")
    status = StatusFile(str(tmp_path / "status"), lambda: {"role": "server"})
    for _ in range(3):
        status.write(now=True)
    assert len(lines_naming(capsys.readouterr().err, "status")) == 1


def test_what_is_told_on_a_full_disk_is_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    tell("anything")
