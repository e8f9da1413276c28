"""Traces of several machines: clocks that differ are found by chains of requests, and corrected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import trace_events
from support.messages import naming

from torchfleet.base.errors import FleetError
from torchfleet.base.tracing.profile_folder import Offset, Part
from torchfleet.base.tracing.span import HANDLE, HELD, PHASE, REQUEST, STEP, WAIT, Span
from torchfleet.observe.profile.chrome_trace import ChromeTrace, clocks
from torchfleet.observe.profile.phase_summary import Row, Summary
from torchfleet.observe.profile.torch_events import TorchTrace

MS = 10**6
NOW = 1_790_000_000 * 10**9
AHEAD = {"a": 0, "b": 5000 * MS, "c": -70 * MS}  # of the machines' clocks


def part(role: str, index: int, machine: str, process: int, spans: list[Span], offsets: Sequence[Offset] = ()) -> Part:
    return Part(role, index, 2, 2, f"host-{machine}", machine, 10, process, "sync", spans, list(offsets))


def job() -> list[Part]:
    """Worker 0 is on a, worker 1 on c, both servers on b; all happens at once by a clock that is right."""
    parts = []
    for index, machine in ((0, "a"), (1, "c")):
        at = NOW + AHEAD[machine]
        spans = [
            Span("step 1", STEP, at, at + 10 * MS, "steps", 1, index + 1),
            Span("forward", PHASE, at, at + 6 * MS, "steps", 1, index + 1),
            Span("wait for pull server 0", WAIT, at + MS, at + 4 * MS, "steps", 1, index + 1),
        ]
        for server in (0, 1):
            name, track = f"pull server {server}", f"requests to server {server}"
            more = {"server_ms": 2.0, "way_ms": 1.0}
            # two requests to one server overlap
            for call, start in ((1, at + MS), (2, at + 2 * MS)):
                spans.append(
                    Span(name, REQUEST, start, start + 3 * MS, track, 1, index + 1, index + 1, call + 10 * server, more)
                )
        ahead = AHEAD["b"] - AHEAD[machine]
        offsets = [Offset(100, 4 * MS, ahead + MS), Offset(101, 2 * MS, ahead), Offset(999, 1, 77)]
        parts.append(part("worker", index, machine, index + 1, spans, offsets))
    for server in (0, 1):
        at = NOW + AHEAD["b"]
        spans = [
            Span(
                f"pull of worker {w}",
                HANDLE,
                at + (1 + w) * MS,
                at + (2 + w) * MS,
                "requests",
                1,
                w + 1,
                w + 1,
                1 + 10 * server,
            )
            for w in (0, 1)
        ]
        spans.append(Span("pull of worker 0, held", HELD, at + 2 * MS, at + 3 * MS, "held", 1, 1, 1, 1))
        parts.append(part("server", server, "b", 100 + server, spans))
    return parts


def test_clocks_are_found_by_the_shortest_chain_of_requests() -> None:
    found = clocks(job())
    assert {machine: clock.ahead for machine, clock in found.items()} == AHEAD
    assert found["a"].round_trip == 0
    assert found["b"].round_trip == 2 * MS
    assert found["c"].round_trip == 4 * MS  # by way of b
    alone = part("rank", 2, "d", 5, [])
    assert not clocks([*job(), alone])["d"].is_measured


def test_all_processes_are_on_one_time_axis_and_slices_nest() -> None:
    document = ChromeTrace(job(), {}).document()
    trace_events.check(document)
    events = document["traceEvents"]
    starts = [event["ts"] for event in events if event.get("cat") == "step"]
    assert starts == [0.0, 0.0]
    handled = sorted(event["ts"] for event in events if event.get("cat") == "handle")
    assert handled == [1000.0, 1000.0, 2000.0, 2000.0]
    arrows = [event for event in events if event["ph"] in "sf"]
    assert len(arrows) == 8  # of the two requests that each server handled of each worker, one
    assert "+5000.000 ms" in document["otherData"]["clocks"]["host-b"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps", "requests to server 0", "requests to server 0 (2)"} <= threads


def test_the_summary_has_what_a_step_is_made_of() -> None:
    summary = Summary(job())
    assert summary.steps.mean == pytest.approx(10.0)
    assert {row.name: row.mean for row in summary.phases} == {"forward": pytest.approx(6.0)}
    assert {row.name: row.mean for row in summary.waits} == {"pull server 0": pytest.approx(3.0)}
    assert [load.computing for load in summary.servers] == [pytest.approx(1.0)] * 2
    assert [load.held for load in summary.servers] == [pytest.approx(0.5)] * 2
    text = "\n".join(summary.lines())
    for expected in ("2 steps of 2 workers, sync", "60 %", "30 %", "pull 1.00", "1.00 ms (median)"):
        assert expected in text
    assert Row("x", tuple(float(i) for i in range(1, 201))).p99 == 198.0


def test_what_torch_saw_is_moved_and_cut_to_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "torch.json"
    base = NOW - 50_000_000_000
    at = (NOW - base) / 1000
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 10, "tid": 11, "ts": at + 500.0, "dur": 5.0}
    kernel = {**op, "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    names = [
        {"ph": "M", "name": "thread_name", "pid": p, "tid": t, "ts": at, "args": {"name": "t"}}
        for p, t in ((10, 11), (0, 7))
    ]
    others = [{**op, "ts": at - 1e6}, {**op, "ts": at + 1e6}, {**op, "pid": "Spans", "tid": "x"}]
    flow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 4, "pid": 10, "tid": 11, "ts": at + 501.0}
    path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": [*names, op, kernel, *others, flow]}))
    document = ChromeTrace(job()[:1], {"worker 0": TorchTrace(path, 10)}).document()
    trace_events.check(document)
    moved = [event for event in document["traceEvents"] if event["name"] in ("aten::mm", "gemm")]
    assert [(event["pid"], event["ts"]) for event in moved] == [
        (1, pytest.approx(500.0)),
        (10100, pytest.approx(500.0)),
    ]
    assert any(
        event["args"].get("name") == "worker 0: GPU 0" for event in document["traceEvents"] if event["ph"] == "M"
    )


def test_a_worker_that_ended_before_its_first_recorded_step_is_left_out(tmp_path: Path) -> None:
    """torch.profiler has seen something of it, but there is no step to cut that to."""
    path = tmp_path / "torch.json"
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 10, "tid": 11, "ts": NOW / 1000, "dur": 5.0}
    path.write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": [op]}))
    first = job()[0]
    document = ChromeTrace([first, part("worker", 1, "a", 2, [])], {"worker 1": TorchTrace(path, 10)}).document()
    trace_events.check(document)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(first.spans)
    assert {event["pid"] for event in slices} == {1}


def test_processes_of_a_large_job_have_numbers_of_their_own() -> None:
    """Viewers show processes with one number as one process."""
    span = Span("step 1", STEP, NOW, NOW + MS, "steps", 1, 1)
    workers = [part("worker", index, "a", index, [span]) for index in range(1002)]
    servers = [part("server", index, "a", 5000 + index, []) for index in range(2)]
    events = ChromeTrace([*servers, *workers], {}).document()["traceEvents"]
    names = [event for event in events if event["name"] == "process_name"]
    numbers = {event["args"]["name"].partition(" (")[0]: event["pid"] for event in names}
    assert len(numbers) == len(set(numbers.values())) == 1004
    assert list(numbers) == sorted(numbers, key=numbers.__getitem__)
    assert list(numbers)[-3:] == ["worker 1001", "server 0", "server 1"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}', "{"])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "torch.json"
    path.write_text(text)
    with pytest.raises(FleetError, match=naming("torch.json")):
        TorchTrace(path, 1)


def test_nothing_recorded_is_an_error() -> None:
    with pytest.raises(FleetError, match="step"):
        ChromeTrace([part("worker", 0, "a", 1, [])], {})
