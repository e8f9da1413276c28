"""Spans reach a collector, linked across processes, and training does not wait for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.extras import OTLP, needing
from support.otlp_receiver import receiver, value_of
from support.scripts.launching import TINY, forked_fleetrun

from torchfleet.base.tracing import otlp
from torchfleet.base.tracing.otlp import OtlpExport
from torchfleet.base.tracing.span import WAIT

pytestmark = needing(OTLP)

EVERY = 4
STEPS = 10


@pytest.mark.slow
def test_a_fleet_sends_linked_spans_of_one_step_of_n(tmp_path: Path) -> None:
    options = ["--server_num", "1", "--worker_num", "1", "--trace_every", str(EVERY), TINY, "--steps", str(STEPS)]
    with receiver() as received:
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint, "OTEL_RESOURCE_ATTRIBUTES": "job=one"}
        with forked_fleetrun(tmp_path, *options, **told) as job:
            assert job.wait() == 0
    by_role: dict[str, list[object]] = {}
    for who, span in received.spans:
        assert who["job"] == "one"
        by_role.setdefault(who["service.instance.id"], []).append(span)
    assert set(by_role) == {"worker-0", "server-0"}
    worker, server = by_role["worker-0"], by_role["server-0"]
    steps = {span.span_id: span for span in worker if not span.parent_span_id}
    assert sorted(span.name for span in steps.values()) == ["step 4", "step 8"]
    phases = [span.name for span in worker if span.parent_span_id in steps and kind_of(span) == "phase"]
    assert sorted(phases) == sorted(["data", "forward", "loss", "backward", "update"] * 2)
    requests = {span.span_id: span for span in worker if kind_of(span) == "request"}
    assert {span.name for span in requests.values()} == {"pull server 0", "push server 0"}
    assert all(request.parent_span_id in steps for request in requests.values())
    handled = [span for span in server if kind_of(span) == "handle"]
    assert {span.name for span in handled} == {"pull of worker 0", "push of worker 0"}
    for span in handled:
        request = requests[span.parent_span_id]
        assert span.trace_id == request.trace_id == steps[request.parent_span_id].trace_id
        assert request.start_time_unix_nano <= span.start_time_unix_nano  # one machine, one clock
        assert span.end_time_unix_nano <= request.end_time_unix_nano


def kind_of(span: object) -> str:
    return {each.key: value_of(each.value) for each in span.attributes}["fleet.kind"]  # type: ignore[attr-defined]


def test_training_does_not_wait_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_LAST", 60.0)
    with receiver() as received:
        received.hold.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
        export = OtlpExport("worker", 0, 5)
        export.recorder.begin(1, "steps")
        took = []
        for _ in range(40):  # the exporter is held up in its first message by then
            start = time.perf_counter()
            export.recorder.note("x", WAIT, 1)
            took.append(time.perf_counter() - start)
            time.sleep(0.005)
        assert not received.spans
        received.hold.set()
        assert export.close() == ""
        assert len(received.spans) == export.num_exported == 40
    assert sorted(took)[20] < 0.001


def test_spans_that_reach_nobody_are_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    export = OtlpExport("server", 0)
    export.recorder.note("x", WAIT, 1)
    assert "1 of 1 spans" in export.close()


def test_spans_for_which_the_queue_has_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_LAST", 60.0)
    with receiver() as received:
        received.hold.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
        export = OtlpExport("worker", 0, 5)
        for _ in range(100):
            export.recorder.note("x", WAIT, 1)
        received.hold.set()
        lost = export.close()
        num_received = len(received.spans)
    assert 0 < num_received == export.num_exported < 100
    assert f"{100 - num_received} of 100 spans" in lost


def test_the_end_waits_some_seconds_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_LAST", 0.2)
    with receiver() as received:
        received.hold.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        export = OtlpExport("worker", 0, 5)
        export.recorder.note("x", WAIT, 1)
        start = time.monotonic()
        lost = export.close()
        took = time.monotonic() - start
    assert "1 of 1 spans" in lost
    assert took < 25  # the collector's silence ends after 30, the exporter's own patience after 60
