"""The record of a run as series, states and events."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from support.cases import each_of
from support.made_history import BEGIN, MadeJob
from support.messages import names

from torchfleet.observe.dashboard.job_record import MOST_POINTS, JobRecord
from torchfleet.observe.dashboard.thinned_series import Columns, Grid


def taken(records: list[dict[str, Any]]) -> JobRecord:
    record = JobRecord()
    for each in records:
        record.take(each)
    return record


def applied(snapshot: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """What a page makes of a snapshot and a delta."""
    made = copy.deepcopy(snapshot)
    made["head"] = delta["head"]
    put(made["job"], delta["job"])
    for key, found in delta["roles"].items():
        told = dict(found)
        tail = told.pop("tail")
        series = made["roles"].get(key, {}).get("series", {"points": [], "values": {}})
        put(series, tail)
        made["roles"][key] = {**told, "series": series}
    made["events"] += delta["events"]
    made["saves"] += delta["saves"]
    return made


def put(series: dict[str, Any], tail: dict[str, Any]) -> None:
    begin = tail["begin"]
    series["points"] = series["points"][:begin] + tail["points"]
    old, series["values"] = series["values"], {}
    for name, column in tail["values"].items():
        series["values"][name] = old.get(name, [None] * begin)[:begin] + column


def test_a_snapshot_and_its_deltas_are_the_next_snapshot() -> None:
    job = MadeJob(seconds=60)
    record = taken(job.start())
    shown = copy.deepcopy(record.snapshot())
    for second in range(1, 60):
        for each in job.second(second):
            record.take(each)
        if second % 7 == 2:
            continue  # two seconds in one delta
        delta = record.delta()
        assert delta is not None
        shown = json.loads(json.dumps(applied(shown, delta)))
    assert shown == json.loads(json.dumps(record.snapshot()))


def test_a_process_that_is_silent_while_the_grid_doubles_loses_no_points() -> None:
    def role(key: str, second: int) -> dict[str, Any]:
        about = {"kind": "role", "key": key, "role": "worker", "state": "running"}
        return {"time": BEGIN + second, **about, "status": {"samples_per_s": float(second)}}

    start = {"time": BEGIN, "kind": "start", "command": [], "attempt": 0}
    record = taken([start, *(role(f"worker.{n}", second) for second in range(MOST_POINTS) for n in (0, 1))])
    record.snapshot()
    record.take(role("worker.0", MOST_POINTS))  # the first second that does not fit; worker 1 says nothing
    assert record.delta() is None
    shown = copy.deepcopy(record.snapshot())
    for begin in (MOST_POINTS + 1, MOST_POINTS + 5):
        for second in range(begin, begin + 4):
            for n in (0, 1):
                record.take(role(f"worker.{n}", second))
        delta = record.delta()
        assert delta is not None
        shown = applied(shown, delta)
    assert shown == record.snapshot()
    assert shown["roles"]["worker.1"]["series"]["points"] == list(range((MOST_POINTS + 8) // 2 + 1))


def test_series_have_the_last_number_of_every_point_and_never_more_points_than_fit() -> None:
    grid, columns, made = Grid(BEGIN, 100), Columns(), random.Random(1)
    given: list[tuple[float, str, float]] = []
    time = BEGIN
    for _ in range(1000):
        time += made.random() * 3
        name, value = made.choice("aaab"), made.random()
        given.append((time, name, value))
        for _ in range(grid.doublings(time)):
            grid.double()
            columns.halve()
        columns.put(grid.point(time), {name: value})
    points = sorted({int((at - BEGIN) / grid.width) for at, _, _ in given})
    assert columns.points == points
    assert len(points) <= 100
    for name in "ab":
        last = {int((at - BEGIN) / grid.width): value for at, found, value in given if found == name}
        assert columns.values[name] == [last.get(point) for point in points]
    assert grid.width == 16.0  # 1500 seconds, more or less, in at most 100 points


def test_many_roles_and_a_long_time_stay_within_bounds() -> None:
    job = MadeJob(num_servers=1, num_workers=3, seconds=4000)
    record = taken(job.start())
    for second in range(1, 4000, 2):
        for each in job.second(second):
            record.take(each)
    snapshot = record.snapshot()
    assert snapshot["grid"]["width"] == 8.0
    for role in snapshot["roles"].values():
        assert MOST_POINTS / 2 <= len(role["series"]["points"]) <= MOST_POINTS
        assert all(len(column) == len(role["series"]["points"]) for column in role["series"]["values"].values())


def test_sums_of_a_job_are_those_of_its_running_workers_and_of_primaries() -> None:
    job = MadeJob(num_servers=2, num_workers=3, seconds=50)
    records = [*job.start(), *job.second(10)]
    backup = copy.deepcopy(next(each for each in records if each.get("key") == "server.0" and each["status"]))
    backup.update(key="server.0.replica1", replica=1)
    backup["status"]["backup"] = True
    gone = copy.deepcopy(records[-1])
    gone.update(state="failed", returncode=-9)
    job_series = taken([*records, backup, gone]).snapshot()["job"]
    last = {each["key"]: each["status"] for each in records if each["kind"] == "role"}
    expected = last["worker.0"]["samples_per_s"] + last["worker.1"]["samples_per_s"]  # worker 2 is gone
    assert job_series["values"]["samples_per_s"][-1] == pytest.approx(expected, rel=1e-6)
    rows = last["server.0"]["tables"]["item"]["rows"] + last["server.1"]["tables"]["item"]["rows"]
    assert job_series["values"]["rows.item"][-1] == rows


def test_restarts_failures_saves_and_ends_are_events() -> None:
    job = MadeJob(seconds=90)
    records = [*job.start(), *(each for second in range(1, 90) for each in job.second(second)), *job.end()]
    snapshot = taken(records).snapshot()
    told = [(event["kind"], event["text"]) for event in snapshot["events"]]
    assert any(kind == "restart" and names(text, "worker.3", 1) for kind, text in told)
    assert any(kind == "info" and names(text, "worker 3", "SIGKILL") for kind, text in told)
    assert told[-1][0] == "end"
    assert snapshot["head"]["state"] == "finished"
    assert [(save["role"], save["num"]) for save in snapshot["saves"]] == [
        ("server.0", 1), ("server.1", 1), ("server.0", 2), ("server.1", 2),
    ]  # fmt: skip


def test_a_job_that_was_cut_short_has_failed_and_another_attempt_runs() -> None:
    start = {"time": BEGIN, "kind": "start", "command": ["train.py"], "attempt": 0, "version": "1"}
    record = taken([start, {"time": BEGIN + 9, "kind": "end", "finished": False}])
    assert record.snapshot()["head"]["state"] == "failed"
    record.take({**start, "time": BEGIN + 10, "attempt": 1})
    head = record.snapshot()["head"]
    assert (head["state"], head["attempt"], head["ended"], head["started"]) == ("running", 1, None, BEGIN)


def test_processes_that_the_end_of_a_job_has_stopped_do_not_run_any_more() -> None:
    job = MadeJob(seconds=90)
    record = taken([*job.start(), *job.second(1)])
    before = record.snapshot()
    record.take({"time": BEGIN + 9, "kind": "end", "finished": False})
    delta = record.delta()
    assert delta is not None
    assert {role["state"] for role in before["roles"].values()} == {"running"}
    assert {role["state"] for role in applied(before, delta)["roles"].values()} == {"stopped"}
    assert record.snapshot()["job"] == before["job"]  # their speed was what it was


def test_machines_of_one_job_have_all_ended_before_it_has() -> None:
    record = JobRecord()
    for source in ("a", "b"):
        record.take({"time": BEGIN, "kind": "start", "command": [], "attempt": 0}, source)
    record.take({"time": BEGIN + 1, "kind": "end", "finished": True}, "a")
    assert record.snapshot()["head"]["state"] == "running"
    record.take({"time": BEGIN + 2, "kind": "end", "finished": True}, "b")
    assert record.snapshot()["head"]["state"] == "finished"


@each_of(
    "record",
    [
        {"time": "soon", "kind": "role", "key": "worker.0"},
        {"time": float("nan"), "kind": "event", "text": "x"},
        {"time": 1, "kind": "role"},
        {"time": 1, "kind": "role", "key": 7, "status": {}},
        {"time": 1, "kind": "role", "key": "worker.0", "status": [1]},
        {"time": 1, "kind": "role", "key": "worker.0", "status": {"metrics": 3, "saves": "x", "tables": [], "rows": 1}},
        {"time": 1, "kind": "role", "key": "server.0", "role": "server", "status": {"tables": {"a": 1}, "rows": None}},
        {"time": 1, "kind": "role", "key": "worker.0", "status": {"metrics": {"loss": float("inf")}, "a": {"b": {}}}},
        {"time": 1, "kind": "role", "key": "worker.0", "status": {"retries": "many", "errors": {}}},
        {"time": 1, "kind": "role", "key": "worker.0", "num_restarts": "x", "state": "failed", "returncode": [1]},
        {"time": 10**400, "kind": "event", "text": "x"},
        {"time": 1, "kind": "role", "key": "worker.0", "status": {"memory": 10**400, "metrics": {"loss": 2**70}}},
        {"time": 1, "kind": "event", "text": {"a": 1}},
        {"time": 1, "kind": "start"},
        {"time": 1, "kind": "what"},
    ],
)
def test_records_that_make_no_sense_do_no_harm(record: dict[str, Any]) -> None:
    made = taken([{"time": BEGIN, "kind": "start", "command": [], "attempt": 0}, record, record])
    json.dumps(made.snapshot(), allow_nan=False)


def test_numbers_that_are_not_finite_are_told_as_texts() -> None:
    status = {"metrics": {"loss": float("nan")}, "samples_per_s": float("inf"), "key": 1 << 60}
    made = taken([{"time": BEGIN, "kind": "role", "key": "worker.0", "role": "worker", "status": status}])
    role = made.snapshot()["roles"]["worker.0"]
    assert role["status"] == {"metrics": {"loss": "nan"}, "samples_per_s": "inf", "key": str(1 << 60)}
    assert role["series"]["values"]["metrics.loss"] == [None]


def test_what_was_counted_is_told_in_words_and_who_has_left_has_no_speed() -> None:
    def role(time: float, key: str, **status: object) -> dict[str, Any]:
        kind, index = key.split(".")
        return {"time": time, "kind": "role", "key": key, "role": kind, "index": int(index), "state": "running",
                "status": status}  # fmt: skip

    record = taken([
        {"time": BEGIN, "kind": "start", "command": ["train.py"], "attempt": 0},
        role(BEGIN + 1, "server.0", errors=0, workers_lost=0),
        role(BEGIN + 1, "worker.0", retries=1, samples_per_s=10.0),
        role(BEGIN + 2, "server.0", errors=2, workers_lost=1),
        role(BEGIN + 2, "worker.0", retries=2, samples_per_s=10.0),
        role(BEGIN + 2, "worker.1", samples_per_s=5.0, left=True),
    ])  # fmt: skip
    snapshot = record.snapshot()
    errors, lost, again = (event["text"] for event in snapshot["events"])
    assert names(errors, "server.0", "2 requests")
    assert names(lost, "server.0", "1 worker")
    assert names(again, "worker.0", "1 request")
    assert snapshot["job"]["values"]["samples_per_s"][-1] == 10.0
