"""`fleet stats` of the servers that the record of a run names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fleets import ForkedServer
from support.job_snapshots import server, worker
from support.messages import names

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.commands.command import main
from torchfleet.observe.watch.history import HistoryWriter


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ForkedServer() as running:
        yield running.endpoint


def recorded(log_dir: Path, *roles: RoleSnapshot) -> HistoryWriter:
    """The record of a run, with `latest` leading to it."""
    run_dir = log_dir / "2026-11-17_05-00-00_1"
    run_dir.mkdir(parents=True)
    (log_dir / "latest").symlink_to(run_dir.name)
    history = HistoryWriter(run_dir, ["train.py"])
    history.look(JobSnapshot(1000.0, roles))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("given", ["latest", ""])
def test_the_folder_of_logs_leads_to_the_running_servers(
    tmp_path: Path, address: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    primary, backup = server(0, address=address), server(1, address="tcp://127.0.0.1:1", backup=True)
    recorded(tmp_path, primary, backup, server(2, "done", address="tcp://127.0.0.1:1"), worker(0))
    assert main(["stats", str(tmp_path / given), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["servers"]) == [address]


def test_a_job_that_has_ended_has_no_servers_to_ask(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, server(0, address=address)).close()
    assert main(["stats", str(tmp_path / "latest")]) == 1
    assert names(capsys.readouterr().err, str(tmp_path / "latest"), "fleet dashboard")


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(tmp_path)]) == 1
    assert names(capsys.readouterr().err, str(tmp_path), "log/latest")


def test_a_long_list_of_addresses_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    many = ",".join(f"127.0.0.1:{port}" for port in range(1, 400))  # longer than a path may be
    assert main(["stats", f"{many},nothing"]) == 1
    assert names(capsys.readouterr().err, "nothing")
