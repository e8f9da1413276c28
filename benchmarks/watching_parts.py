"""What single parts of watching cost, in processor time: a scrape, a step, a record of event files, a line of JSON.

python -m benchmarks.watching_parts --json      about ten seconds; the cost of all of it in a job: benchmarks.watching

Rivals of the same run: prometheus_client's own histogram, and a log that is written as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.timing import interleave, report
from torchfleet.base.monitor.json_lines import JsonLog
from torchfleet.base.monitor.log_file import LogFile
from torchfleet.base.monitor.prometheus.exposition import Exposition, Published
from torchfleet.base.monitor.prometheus.metrics_port import MetricsPort
from torchfleet.base.monitor.prometheus.step_times import BOUNDS, StepTimes
from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch.tensorboard_events import TensorBoardEvents

_TABLES = 14
_ROLES = 6  # 2 servers and 4 workers
WORKER: dict[str, Any] = {
    "mode": "async", "steps": 1200, "steps_per_s": 40.5, "samples": 614_400, "samples_per_s": 20_736.0, "queue": 1,
    "queue_size": 2, "waiting": 0.6, "retries": 0, "pull_wait_ms": 3.2, "push_wait_ms": 0.5, "pull_waited_s": 3.8,
    "push_waited_s": 0.6, "memory": 450_000_000, "metrics": {"loss": 0.45, "auc": 0.78},
}  # fmt: skip
SERVER: dict[str, Any] = {
    "requests": 2400, "requests_per_s": 80.0, "errors": 0, "dropped": 0, "busy": 0.4, "memory": 300_000_000,
    "commands": {"pull": 1200, "push": 1200, "ping": 60, "stats": 4}, "bytes_in": 10**9, "bytes_out": 10**9,
    "rows": {f"slot{i}": 1000 * i for i in range(_TABLES)},
    "tables": {
        f"slot{i}": {"kind": "sparse", "rows": 1000 * i, "bytes": 10**6 * i, "created": 1000 * i, "evicted": 0}
        for i in range(_TABLES)
    },
    "staleness_dense": dict.fromkeys(range(9), 100), "staleness_sparse": dict.fromkeys(range(5), 100),
}  # fmt: skip


def microseconds(num: int, work: Callable[[], object]) -> Callable[[], float]:
    """Processor time of this process for one of `num` calls, its threads included."""

    def measure() -> float:
        started = time.process_time()
        for _ in range(num):
            work()
        return (time.process_time() - started) / num * 1e6

    return measure


def scrape(status: dict[str, Any]) -> Callable[[], object]:
    exposition, registry = Exposition({"role": "server", "index": "0"}, StepTimes()), CollectorRegistry()
    exposition.published = Published(status)
    registry.register(exposition)
    return lambda: generate_latest(registry)


def over_http(status: dict[str, Any], num: int) -> Callable[[], float]:
    """The same through the port, the client being another process."""
    port = MetricsPort("127.0.0.1", 0, {"role": "server", "index": "0"})
    port.publish(status)
    code = (
        f"import urllib.request as r\nfor _ in range({num}): r.urlopen('http://127.0.0.1:{port.port}/metrics').read()"
    )

    def measure() -> float:
        started = time.process_time()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        return (time.process_time() - started) / num * 1e6

    return measure


def records(folder: Path) -> Callable[[], object]:
    """One look at a job in which all processes are due."""
    events = TensorBoardEvents(folder, ["train.py"])
    seconds = iter(range(10**9))

    def look() -> None:
        second = next(seconds)
        roles = [RoleSnapshot("server", i, "running", {**SERVER, "requests": second}) for i in range(2)]
        roles += [RoleSnapshot("worker", i, "running", {**WORKER, "steps": second}) for i in range(_ROLES - 2)]
        events.end(JobSnapshot(2e9 + second, roles))

    return look


def contenders(folder: Path) -> dict[str, Callable[[], float]]:
    times, rival = StepTimes(), Histogram("rival_seconds", "x", registry=CollectorRegistry(), buckets=BOUNDS)
    plain = LogFile(folder / "plain", False, 1 << 30, print)
    lines = LogFile(folder / "json", False, 1 << 30, print)
    made = JsonLog(lines.write, "worker", 0)
    line = b"train step 1200 | 20,736 samples/s | loss 0.45678 | auc 0.78123\n"
    return {
        "scrape_worker_us": microseconds(100, scrape(WORKER)),
        f"scrape_server_{_TABLES}_tables_us": microseconds(100, scrape(SERVER)),
        f"scrape_server_{_TABLES}_tables_by_http_us": over_http(SERVER, 100),
        "step_us": microseconds(20_000, times.note),
        "step_rival_us": microseconds(20_000, lambda: rival.observe(time.monotonic() - 1e6)),
        f"events_of_{_ROLES}_roles_us": microseconds(50, records(folder / "events")),
        "line_json_us": microseconds(5_000, lambda: made.write(line)),
        "line_plain_us": microseconds(5_000, lambda: plain.write(line)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching_parts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(dict(interleave(options.rounds, contenders(Path(folder)))), options.json)


if __name__ == "__main__":
    main()
