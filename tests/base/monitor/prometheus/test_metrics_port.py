"""The metrics port: what Prometheus' own reader finds there, and how little a client can do with it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.extras import Late, needing
from support.messages import naming

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.prometheus.exposition import buckets_of
from torchfleet.base.monitor.prometheus.metrics_port import MetricsPort, open_metrics_port
from torchfleet.base.monitor.prometheus.step_times import StepTimes

pytestmark = needing("prometheus_client")
parser = Late("prometheus_client.parser")

ROOT = Path(__file__).parents[4]
WORKER: dict[str, Any] = {
    "role": "worker", "mode": "async", "steps": 120, "samples": 7680, "pull_waited_s": 1.5, "push_waited_s": 0.25,
    "waiting": 0.1, "queue": 1, "queue_size": 2, "retries": 3, "metrics": {"loss": 0.5, 'a"b\\c\nd': -1.0},
    "progress": {"epoch": 1, "done": 50, "total": 200, "unit": "samples", "eta_s": 12.5}, "memory": 1 << 28,
}  # fmt: skip
SERVER: dict[str, Any] = {
    "role": "server", "commands": {"pull": 120, "push": 119}, "errors": 1, "dropped": 2, "busy": 0.75, "backup": True,
    "tables": {"items": {"kind": "sparse", "rows": 9, "bytes": 720, "created": 11, "evicted": 2}}, "memory": 1 << 27,
    "bytes_in": 1000, "bytes_out": 2000, "workers_joined": 2, "workers_lost": 1,
    "saves": {"num": 1, "last_time": 1.7e9, "last_seconds": 0.5, "last_rows": 9, "last_bytes": 800, "dirname": "m"},
    "staleness_dense": {0: 5, 3: 2}, "staleness_sparse": {"1": 4, "16": 2, "64": 1},
}  # fmt: skip

HETER: dict[str, Any] = {"role": "heter_worker", "passes": 1234, "sessions": 2, "busy": 0.5, "errors": 1}


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    made = MetricsPort("127.0.0.1", 0, {"role": "worker", "index": "0"})
    yield made
    made.close()


def page(port: MetricsPort, accept: str = "") -> str:
    asked = urllib.request.Request(f"http://127.0.0.1:{port.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=60) as found:
        return str(found.read().decode())


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("role", "index")}
            found[sample.name, tuple(labels.items())] = sample.value
    return found


def test_a_worker_has_what_its_status_says(port: MetricsPort) -> None:
    port.publish(WORKER)
    for _ in range(3):
        port.step_made()
    found = samples(page(port))
    assert found["torchfleet_steps_total", ()] == 120
    assert found["torchfleet_samples_total", ()] == 7680
    assert found["torchfleet_pull_wait_seconds_total", ()] == 1.5
    assert found["torchfleet_metric", (("name", "loss"),)] == 0.5
    assert found["torchfleet_metric", (("name", 'a"b\\c\nd'),)] == -1.0
    assert found["torchfleet_epoch_done_ratio", ()] == 0.25
    assert found["torchfleet_step_seconds_count", ()] == 2  # times between three steps
    assert found["torchfleet_step_seconds_bucket", (("le", "+Inf"),)] == 2
    assert found["torchfleet_status_age_seconds", ()] < 60
    assert not any(name.startswith("torchfleet_server") for name, _ in found)


def test_a_server_has_requests_tables_and_ages(port: MetricsPort) -> None:
    port.publish(SERVER)
    found = samples(page(port))
    assert found["torchfleet_server_requests_total", (("command", "push"),)] == 119
    assert found["torchfleet_table_rows", (("table", "items"),)] == 9
    assert found["torchfleet_rows_evicted_total", (("table", "items"),)] == 2
    assert found["torchfleet_staleness_updates_bucket", (("kind", "sparse"), ("le", "31"))] == 6
    assert found["torchfleet_staleness_updates_count", (("kind", "sparse"),)] == 7


def test_a_heter_worker_has_its_passes_and_workers(port: MetricsPort) -> None:
    port.publish(HETER)
    found = samples(page(port))
    assert (found["torchfleet_heter_passes_total", ()], found["torchfleet_heter_sessions", ()]) == (1234, 2)


def test_buckets_of_ages_count_what_is_at_most_as_old() -> None:
    ages = {0: 1, 3: 2, 15: 4, 16: 8, 32: 16, 1024: 32}  # 16 stands for 16 to 31, and so on
    found = dict(buckets_of(ages))
    assert (found["0"], found["2"], found["3"], found["15"], found["31"], found["63"]) == (1, 1, 3, 7, 15, 31)
    assert (found["1023"], found["+Inf"]) == (31, 63)


def test_steps_are_counted_by_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.002, 10.5, 30.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    times = StepTimes()
    for _ in range(4):
        times.note()
    counts, total = times.taken()
    assert counts == [0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert total == pytest.approx(20.5)


def test_openmetrics_is_spoken_to_whoever_asks_for_it(port: MetricsPort) -> None:
    port.publish({**WORKER, **SERVER})
    text = page(port, "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert 'torchfleet_steps_total{index="0",role="worker"} 120.0' in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the program promtool")
def test_promtool_finds_no_fault(port: MetricsPort) -> None:
    port.publish({**WORKER, **SERVER})
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page(port), capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def exported(port: MetricsPort) -> dict[str, str]:
    """All metrics that there are, by name: their kinds."""
    port.publish({**WORKER, **SERVER, **HETER})
    port.step_made()
    port.step_made()
    kinds = re.findall(r"^# TYPE (torchfleet_\S+) (\S+)$", page(port), re.MULTILINE)
    return dict(kinds)


def test_the_documents_list_every_metric_with_its_kind(port: MetricsPort) -> None:
    listed = re.findall(
        r"^\| `(torchfleet_\w+)` \| (\w+) \|", (ROOT / "docs/metrics_export.md").read_text(), re.MULTILINE
    )
    assert dict(listed) == exported(port)


def test_the_dashboard_of_grafana_asks_for_nothing_that_is_not_there(port: MetricsPort) -> None:
    board = json.loads((ROOT / "deploy/grafana/torchfleet.json").read_text())
    asked = {
        re.sub("_bucket$", "", name)
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"torchfleet_\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= set(exported(port))


def test_other_paths_and_methods_are_refused(port: MetricsPort) -> None:
    for path, method, status in (("/", "GET", 404), ("/metrics/../etc", "GET", 404), ("/metrics", "POST", 501)):
        asked = urllib.request.Request(f"http://127.0.0.1:{port.port}{path}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=60)
        assert refused.value.code == status
        refused.value.close()


@pytest.mark.slow
def test_a_client_that_sends_drop_by_drop_holds_the_port_for_a_moment_only(port: MetricsPort) -> None:
    port.publish(WORKER)
    with socket.create_connection(("127.0.0.1", port.port)) as slow, socket.create_connection(("127.0.0.1", port.port)):
        slow.sendall(b"GET /met")
        assert "torchfleet_steps_total" in page(port)


def test_silent_clients_do_not_keep_others_from_scraping(port: MetricsPort) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port.port), timeout=30))
        began = time.monotonic()
        assert "torchfleet" in page(port)
        assert time.monotonic() - began < 30  # one at a time, they would take two minutes


@pytest.mark.parametrize(("host", "status"), [("evil.example", 421), ("localhost:9", 200), ("10.0.0.7:9400", 200)])
def test_another_host_is_refused(port: MetricsPort, host: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Host": host})
        assert connection.getresponse().status == status


def test_a_port_that_other_machines_reach_takes_the_name_of_a_service() -> None:
    made = MetricsPort("0.0.0.0", 0, {"role": "worker", "index": "0"})
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=30)
    try:
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Host": "job-worker.default.svc"})
            assert connection.getresponse().status == 200
    finally:
        made.close()


def test_a_port_that_is_taken_is_an_error_that_names_it(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RoleError, match=naming(f"127.0.0.1:{port.port}", "FLEET_METRICS_PORT")):
        MetricsPort("127.0.0.1", port.port, {})
    monkeypatch.delenv("FLEET_METRICS_PORT", raising=False)
    assert open_metrics_port("worker", 0) is None
    monkeypatch.setenv("FLEET_METRICS_PORT", "70000")
    with pytest.raises(RoleError, match=naming(1, 65535, "'70000'")):
        open_metrics_port("worker", 0)


def test_a_closed_port_is_free_again(port: MetricsPort) -> None:
    other = MetricsPort("127.0.0.1", 0, {})
    number = other.port
    other.close()
    MetricsPort("127.0.0.1", number, {}).close()
