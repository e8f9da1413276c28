"""What stays behind when a job cannot be watched as it was asked for: nothing."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from torchfleet.errors import FleetError
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.roles import JobLayout
from torchfleet.launch.supervisor import JobSupervisor
from torchfleet.watch.history import HistoryReader
from torchfleet.watch.watchers import Watching


def test_a_taken_port_of_the_dashboard_leaves_signals_as_they_were_and_ends_the_record(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        watching = Watching(dashboard=taken.getsockname()[1])
        job = JobSpec(("train.py",), tmp_path, watching=watching)
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(FleetError, match="the dashboard cannot listen"):
            JobSupervisor(job, JobLayout((), (), (), ()), [], tmp_path).run()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert [record["kind"] for record in HistoryReader(tmp_path).records()] == ["start", "end"]
