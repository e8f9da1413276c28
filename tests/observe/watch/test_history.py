"""The record of a run: what is written, how often, and what of it is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.job_snapshots import server, worker
from support.messages import lines_naming

from torchfleet.base.monitor.snapshot import JobSnapshot
from torchfleet.observe.watch import history
from torchfleet.observe.watch.history import HistoryReader, HistoryWriter


@pytest.fixture(autouse=True)
def began_at_1000(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history.time, "time", lambda: 1000.0)


def test_a_role_is_recorded_when_its_state_changes_and_else_once_a_period_if_it_changes(tmp_path: Path) -> None:
    writer, reader = HistoryWriter(tmp_path, ["train.py"], attempt=1), HistoryReader(tmp_path)
    writer.look(JobSnapshot(1000.0, [server(0), worker(0, "starting")]))
    for look in range(41):  # ten seconds; the worker goes on, the server stands still
        writer.look(JobSnapshot(1000.5 + look / 4, [server(0), worker(0, steps=look)]))
    event = "[fleetrun] worker 0 ended with -9; starting it again"
    writer.note(event, True)
    writer.note("[worker 0] what it prints is in its log", False)
    writer.end(JobSnapshot(1011.0, [server(0, "done"), worker(0, "done", steps=99)]))
    writer.close()
    found = list(reader.records())
    assert [found[0]["kind"], found[0]["command"], found[0]["attempt"]] == ["start", ["train.py"], 1]
    assert [r["text"] for r in found if r["kind"] == "event"] == [
        "[fleetrun] worker 0 ended with -9; starting it again"
    ]
    of_worker = [record for record in found if record.get("key") == "worker.0"]
    assert [record["state"] for record in of_worker][:2] == ["starting", "running"]
    assert 10 <= len(of_worker) <= 14
    assert of_worker[-1]["status"]["steps"] == 99
    assert len([record for record in found if record.get("key") == "server.0"]) == 2  # as it was, and its end
    assert (found[-1]["kind"], found[-1]["finished"]) == ("end", True)
    assert list(reader.records()) == []


def test_a_record_of_a_long_job_stays_small(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, ["train.py"])
    for minute in range(7 * 24 * 60):
        writer.look(JobSnapshot(1000.0 + 60 * minute, [worker(0, steps=minute)]))
    writer.close()
    num = (tmp_path / history.NAME).stat().st_size
    assert num < 8_000_000  # of one role in a week


def test_a_full_disk_is_told_once_and_the_job_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / history.NAME).symlink_to("/dev/full")
    writer = HistoryWriter(tmp_path, ["train.py"])
    for look in range(5):
        writer.look(JobSnapshot(1000.0 + 2 * look, [worker(0, steps=look)]))
    writer.close()
    assert capsys.readouterr().err.count("[Errno 28]") == 1


def test_a_folder_that_is_gone_is_told_and_the_job_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = HistoryWriter(tmp_path / "gone", ["train.py"])
    writer.look(JobSnapshot(1000.0, [worker(0)]))
    writer.close()
    assert len(lines_naming(capsys.readouterr().err, tmp_path / "gone")) == 1


def test_torn_and_foreign_lines_are_passed_over_and_one_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path, reader = tmp_path / history.NAME, HistoryReader(tmp_path)
    whole = json.dumps({"time": 1.0, "kind": "event", "text": "one"})
    path.write_text(f'{whole}\n{{"time": 2.0, "ki\n[1, 2]\n{{"kind": "event"}}\n\x00\x00\n{whole}\n{whole[:20]}')
    assert [record["text"] for record in reader.records()] == ["one", "one"]
    with path.open("a") as file:
        file.write(whole[20:])
    assert list(reader.records()) == []
    with path.open("a") as file:
        file.write("\n")
    assert [record["text"] for record in reader.records()] == ["one"]


def test_lines_that_are_deep_or_endless_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_LINE", 300_000)
    whole = json.dumps({"time": 1.0, "kind": "event", "text": "one"})
    (tmp_path / history.NAME).write_text(f"{'[' * 200_000}\n{whole}\n{'x' * 1_000_000}\n{whole}\n")
    assert [record["text"] for record in HistoryReader(tmp_path).records()] == ["one", "one"]


def test_a_record_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / history.NAME).write_text('{"time": 1.0, "kind": "ev')
    HistoryWriter(tmp_path, ["train.py"], attempt=1).close()
    assert [record["kind"] for record in HistoryReader(tmp_path).records()] == ["start", "end"]


def test_a_clock_that_is_set_back_does_not_stop_the_record(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, ["train.py"])
    for look in range(6):
        writer.look(JobSnapshot(5000.0 + 2 * look, [worker(0, steps=look)]))
    for look in range(6):
        writer.look(JobSnapshot(1400.0 + 2 * look, [worker(0, steps=6 + look)]))
    steps = [record["status"]["steps"] for record in HistoryReader(tmp_path).records() if record["kind"] == "role"]
    assert steps[-1] == 11
    writer.close()
