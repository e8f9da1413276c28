"""Served models on the dashboard: figures from the metrics of `fleet serve`."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.extras import needs
from support.made_history import MadeJob, write

from torchfleet.apps.serve.serving_metrics import ServingMetrics
from torchfleet.base.errors import FleetError
from torchfleet.observe.dashboard.dashboard_server import Dashboard
from torchfleet.observe.dashboard.run_folders import RunFolders
from torchfleet.observe.dashboard.served_models import ServedModels

TOKEN = "a token of a test"


class Metrics(HTTPServer):
    """Stands for `fleet serve`: its metrics, behind a token."""

    def __init__(self) -> None:
        needs("prometheus_client")
        self.metrics, self.text = ServingMetrics(None, 0, 1), b""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v2/models/clicks"


class _Handler(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        is_right = self.headers["Authorization"] == f"Bearer {TOKEN}" and self.path == "/metrics"
        self.send_response(200 if is_right else 401)
        self.end_headers()
        self.wfile.write(self.server.text or self.server.metrics.exposition())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metrics]:
    monkeypatch.setattr("torchfleet.observe.dashboard.served_models._TIMEOUT", 60.0)  # a thread of this process answers
    made = Metrics()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_rates_and_latencies_are_those_since_the_last_look(serving: Metrics) -> None:
    served = ServedModels([serving.url], TOKEN, period=0.0)
    serving.metrics.version(7, 1.0)
    serving.metrics.request(200, 4.0)  # before the first look
    (first,) = served.rows()
    assert (first["model"], first["is_reached"], first["version"]) == ("clicks", True, 7)
    assert first["age_s"] > 1e9
    assert first["rate"] is first["p99_ms"] is None
    for _ in range(99):
        serving.metrics.request(200, 0.004)
    serving.metrics.request(503, 0.001)
    (second,) = served.rows()
    assert second["p99_ms"] == 5.0
    assert second["rate"] == pytest.approx(100 * second["refused_rate"])
    (third,) = served.rows()
    assert (third["rate"], third["p99_ms"]) == (0.0, None)


@pytest.mark.parametrize("text", [b"torchfleet_serve_requests_total nan\n", b"\xff\n", b"other 1\n", b"x" * (2 << 20)])
def test_what_is_not_fleet_serve_does_not_answer(serving: Metrics, text: bytes) -> None:
    serving.text = text
    (row,) = ServedModels([serving.url], TOKEN).rows()
    assert (row["is_reached"], row["version"], row["rate"]) == (False, None, None)


def test_without_the_token_or_the_server_there_is_a_row(serving: Metrics) -> None:
    rows = ServedModels([serving.url, "http://127.0.0.1:1/v2/models/other"]).rows()
    assert [(row["model"], row["is_reached"]) for row in rows] == [("clicks", False), ("other", False)]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://a:80/metrics", "ftp://a/v2/models/m", "http://u@a/v2/models/m"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(FleetError):
        ServedModels([url])


def test_the_page_gets_the_rows(serving: Metrics, tmp_path: Path) -> None:
    run = write(tmp_path / "run", MadeJob(seconds=5), until=2)
    dashboard = Dashboard(RunFolders([run]), port=0, served=ServedModels([serving.url], TOKEN))
    try:
        with urllib.request.urlopen(f"{dashboard.url}api/served", timeout=60) as answer:
            (row,) = json.loads(answer.read())["served"]
        assert (row["model"], row["is_reached"]) == ("clicks", True)
        with urllib.request.urlopen(dashboard.url, timeout=60) as answer:
            assert b'id="served-table"' in answer.read()
    finally:
        dashboard.close(patience=0.5)
