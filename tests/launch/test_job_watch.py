"""What stays behind when a job cannot be watched as it was asked for: nothing. A watcher that fails ends no job."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming

from torchfleet.base import cgroups
from torchfleet.base.errors import FleetError
from torchfleet.launch.job_spec import JobSpec, Task
from torchfleet.launch.job_watch import JobWatch
from torchfleet.launch.roles import JobLayout
from torchfleet.launch.supervisor import JobSupervisor
from torchfleet.observe.dashboard.job_record import JobRecord
from torchfleet.observe.watch.history import HistoryReader
from torchfleet.observe.watch.watchers import Watching


def test_a_taken_port_of_the_dashboard_leaves_signals_as_they_were_and_ends_the_record(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        watching = Watching(dashboard=taken.getsockname()[1])
        job = JobSpec(("train.py",), tmp_path, watching=watching)
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(FleetError, match=naming(watching.dashboard)):
            JobSupervisor(job, JobLayout((), (), (), ()), [], tmp_path).run()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert [record["kind"] for record in HistoryReader(tmp_path).records()] == ["start", "end"]


class Odd:
    """A process whose status is of another release."""

    task, log, num_restarts, returncode, is_waiting = Task("worker", 0), Path("workerlog.0"), 0, None, False

    def status(self) -> dict[str, Any]:
        return {
            "role": "worker",
            "metrics": 3,
            "samples": "many",
            "samples_per_s": {"now": 1},
            "steps_per_s": "?",
            "progress": 1,
        }


def test_a_status_that_a_watcher_cannot_show_ends_the_watcher_and_not_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = JobWatch(JobSpec(("train.py",), tmp_path), tmp_path)
    watch.show([Odd()])  # type: ignore[list-item]
    watch.show_end([Odd()])  # type: ignore[list-item]
    watch.close()
    assert capsys.readouterr().err.count("[fleetrun] Display ends: ") == 1
    kinds = [record["kind"] for record in HistoryReader(tmp_path).records()]
    assert (kinds[0], kinds[-1]) == ("start", "end")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_is_off_is_shown_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    monkeypatch.setattr(cgroups, "memory_left", lambda: 1_000_000)
    monkeypatch.setattr(cgroups, "memory_limit", lambda: 4_000_000_000)
    text = "memory is short: 1.0 MB of 4.0 GB are left here"
    watch = JobWatch(JobSpec(("train.py",), tmp_path, watching=Watching(log_format=log_format)), tmp_path)
    watch.show([])
    watch.show_end([])
    watch.close()
    shown = capsys.readouterr().out.splitlines()
    if log_format == "json":
        (line,) = (found for each in shown if (found := json.loads(each))["level"] == "warning")
        assert (line["role"], line["text"]) == ("fleetrun", f"warning: {text}")
    else:
        assert shown.count(f"[fleetrun] warning: {text}") == 1
    record = JobRecord()
    for each in HistoryReader(tmp_path).records():
        record.take(each)
    assert next((event["kind"], event["text"]) for event in record.snapshot()["events"]) == ("warning", text)
