"""One fleet under everything that watches it: Prometheus scrapes it, TensorBoard reads it, its logs are JSON."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.extras import Late, needing
from support.messages import names
from support.scripts.launching import SOON, START, Started, forked_fleetrun, run_dir, wait_until
from support.scripts.watched import BATCH, STEPS

from torchfleet.launch import roles
from torchfleet.launch.roles import free_ports
from torchfleet.observe.watch.history import HistoryReader

pytestmark = needing("tensorboard", "prometheus_client")
reading = Late("tensorboard.backend.event_processing.event_accumulator")

SCRIPT = str(Path(__file__).parents[1] / "support/scripts/watched.py")
PATIENCE = START


def free_row(num: int) -> int:
    """The first of `num` free ports in a row, which no other job of this user is given meanwhile."""
    for _ in range(1000):
        first = free_ports(1)[0]
        if all(_is_free(first + i) and roles._claim(first + i) for i in range(1, num)):
            return first
    raise AssertionError("no ports in a row are free")


def _is_free(port: int) -> bool:
    with socket.socket() as tried, contextlib.suppress(OSError):
        tried.bind(("127.0.0.1", port))
        return True
    return False


def page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as found:
            return str(found.read().decode())
    except OSError:
        return ""


class OwnPrometheus:
    """Debian's prometheus with the configuration of the repository, but for where it looks and how often."""

    def __init__(self, folder: Path, targets: Path) -> None:
        (self._port,) = free_ports(1)
        config = (Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml").read_text()
        assert "../../log/latest/prometheus_targets.json" in config
        config = config.replace("../../log/latest/prometheus_targets.json", str(targets)).replace("5s", "1s")
        (folder / "prometheus.yml").write_text(config)
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=warn",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, query: str) -> dict[tuple[str, ...], float]:
        """The values now, by role and index and, if there is one, name, table or command."""
        asked = f"http://127.0.0.1:{self._port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(asked, timeout=60) as found:
                results = json.load(found)["data"]["result"]
        except OSError:
            return {}
        names = ("role", "index", "name", "table", "command")
        return {
            tuple(one["metric"][name] for name in names if name in one["metric"]): float(one["value"][1])
            for one in results
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for one in made:
        one.close()


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in HistoryReader(folder).records():
        if record["kind"] == "role":
            found.setdefault(record["key"], []).append(record)
    return found


def check_events(folder: Path, kept: dict[str, list[dict[str, Any]]], tag: str, field: str) -> None:
    """Event files have the values of the history, at the same times and steps."""
    for key, own in kept.items():
        known = [one for one in own if field in one["status"].get("metrics", {})]
        if not known:
            continue
        read = reading.EventAccumulator(str(folder / key), size_guidance={"scalars": 0}).Reload()
        expected = [(one["time"], one["status"]["steps"], one["status"]["metrics"][field]) for one in known]
        found = [(round(one.wall_time, 3), one.step, one.value) for one in read.Scalars(tag)]
        assert found == [(time, step, pytest.approx(value, rel=1e-6)) for time, step, value in expected]


def json_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]]


def check_logs(folder: Path, lines: list[str], role: str) -> None:
    for index in range(2):
        found = json_log(folder / f"workerlog.{index}")
        assert {(line["role"], line["index"]) for line in found} == {(role, index)}
        told = {line["text"]: line["level"] for line in found}
        assert told["größer"] == "info"
        assert told["WARNING: half a \ufffd line"] == "warning"
    shown = [json.loads(line) for line in lines]
    assert {line["role"] for line in shown} == {"fleetrun", role}
    assert any(names(line["text"], folder) for line in shown if line["role"] == "fleetrun")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the program prometheus")
def test_a_fleet_is_scraped_by_prometheus_read_by_tensorboard_and_logs_json(tmp_path: Path, ended: list[Any]) -> None:
    first, end = free_row(3), tmp_path / "end"
    options = ["--metrics_port", str(first), "--tensorboard", str(tmp_path / "tb"), "--log_format", "json"]
    with forked_fleetrun(tmp_path / "log", *options, "--worker_num", "2", SCRIPT, "servers", str(end)) as job:
        targets = tmp_path / "log/latest/prometheus_targets.json"
        wait_until(targets.exists, PATIENCE, "list of targets")
        ended.append(scraper := OwnPrometheus(tmp_path, targets))
        workers = [("worker", "0"), ("worker", "1")]
        wait_until(
            lambda: scraper.ask("torchfleet_steps_total") == dict.fromkeys(workers, float(STEPS)), PATIENCE, "all steps"
        )
        wait_until(lambda: len(scraper.ask("torchfleet_metric")) == 4, PATIENCE, "metrics")
        wait_until(lambda: scraper.ask("up == 1") != {} and len(scraper.ask("torchfleet_build_info")) == 3, SOON, "up")
        assert scraper.ask("torchfleet_samples_total") == dict.fromkeys(workers, float(STEPS * BATCH))
        assert scraper.ask("torchfleet_step_seconds_count") == dict.fromkeys(workers, STEPS - 1.0)
        assert scraper.ask('torchfleet_metric{name="index"}') == {
            (*worker, "index"): float(worker[1]) for worker in workers
        }
        assert scraper.ask('torchfleet_table_rows{table="rows"}') == {("server", "0", "rows"): 64.0}
        pushes = 'torchfleet_server_requests_total{command="push"}'
        wait_until(lambda: scraper.ask(pushes) == {("server", "0", "push"): 2.0 * STEPS}, PATIENCE, "all pushes")
        assert scraper.ask('sum(torchfleet_staleness_updates_count{kind="sparse"})') == {(): 2.0 * STEPS}
        losses = scraper.ask('torchfleet_metric{name="loss"}')
        end.touch()
        assert job.wait() == 0
    folder = run_dir(tmp_path / "log")
    kept = records(folder)
    assert {key: own[-1]["status"]["steps"] for key, own in kept.items() if "worker" in key} == {
        "worker.0": STEPS, "worker.1": STEPS,
    }  # fmt: skip
    assert losses == {
        ("worker", str(i), "loss"): kept[f"worker.{i}"][-1]["status"]["metrics"]["loss"] for i in range(2)
    }
    check_events(tmp_path / "tb" / folder.name, kept, "metrics/loss", "loss")
    check_logs(folder, job.output.splitlines(), "worker")
    assert {line["role"] for line in json_log(folder / "serverlog.0")} == {"server"}


def test_ranks_have_ports_event_files_and_json_logs(tmp_path: Path) -> None:
    first, end = free_row(2), tmp_path / "end"
    options = ["--metrics_port", str(first), "--tensorboard", str(tmp_path / "tb"), "--log_format", "json"]
    with forked_fleetrun(tmp_path / "log", *options, "--nproc_per_node", "2", SCRIPT, "collective", str(end)) as job:
        for i in range(2):
            line = f'torchfleet_steps_total{{index="{i}",role="rank"}} {float(STEPS)}'
            wait_until(lambda i=i, line=line: line in page(first + i), PATIENCE, line)  # type: ignore[misc]
        end.touch()
        assert job.wait() == 0
    folder = run_dir(tmp_path / "log")
    kept = records(folder)
    assert kept["rank.1"][-1]["status"]["steps"] == STEPS
    check_events(tmp_path / "tb" / folder.name, kept, "metrics/loss", "loss")
    check_logs(folder, job.output.splitlines(), "rank")
    assert not list(folder.glob(".output.*"))


@pytest.mark.parametrize("kind", ["servers", "ranks"])
def test_the_last_lines_of_a_process_that_fails_are_text_within_json(kind: str, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "import sys\nprint('before', flush=True)\nraise SystemExit('it failed: \"so\"')\n"
    )
    how = ["--worker_num", "1"] if kind == "servers" else ["--nproc_per_node", "1"]
    with forked_fleetrun(tmp_path / "log", "--log_format", "json", *how, str(tmp_path / "fail.py")) as job:
        assert job.wait() == 1
    found = [json.loads(line) for line in job.output.splitlines()]
    errors = [line for line in found if line["level"] == "error"]  # the other process may print after them
    last = [(line["role"], line["text"]) for line in errors][-2:]
    assert last == [("fleetrun", "before"), ("fleetrun", 'it failed: "so"')]
    assert any(names(line["text"], "status 1") for line in errors)


def dry_run(folder: Path, *options: str) -> Started:
    return forked_fleetrun(folder / "log", "--dry_run", *options, SCRIPT)


def test_ports_are_told_before_anything_starts_and_mistakes_are_found(tmp_path: Path) -> None:
    with dry_run(tmp_path, "--worker_num", "2", "--metrics_port", "9400", "--metrics_host", "0.0.0.0") as told:
        assert told.wait() == 0
    ports = [line.strip() for line in told.output.splitlines() if "FLEET_METRICS_PORT" in line]
    assert ports == [f"FLEET_METRICS_PORT={port}" for port in (9400, 9401, 9402)]
    for options, error in (
        (["--metrics_port", "0"], "--metrics_port must be a port from 1 to 65535, found '0'"),
        (["--metrics_port", "65535"], "process 1 would have port 65536"),
        (["--metrics_host", "::"], "add --metrics_port PORT"),
        (["--metrics_port", "9400", "--simulate"], "leave --metrics_port out"),
        (["--log_format", "json", "--simulate"], "leave --log_format out"),
    ):
        with dry_run(tmp_path, *options) as refused:
            assert refused.wait() == 2
        assert error in refused.output
