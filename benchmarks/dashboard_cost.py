"""What the dashboard costs `fleetrun`: its CPU time per second of a job, without the page, with it, with a client.

python -m benchmarks.dashboard_cost --json

The processes of the job compute nothing and write the status of a real one twice a second. The three variants run at
the same time as each other, so that all meet the same machine, for several rounds; medians are told. A client reads the
stream of events as a browser does.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.timing import log, report

VARIANTS = ("without", "with", "with and a client")
_ROLE = """
import json, os, random, signal, sys, time
path, is_server = os.environ["FLEET_STATUS_FILE"], os.environ["FLEET_ROLE"] == "SERVER"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
steps = 0
while True:
    steps += 20
    if is_server:
        tables = {f"table{i}": {"kind": "sparse", "rows": 1000 * steps, "bytes": 84_000 * steps} for i in range(8)}
        told = {"role": "server", "requests": steps, "requests_per_s": 40.5, "busy": random.random(), "tables": tables,
                "rows": {name: table["rows"] for name, table in tables.items()}, "memory": 10**9,
                "staleness_dense": {str(age): steps for age in range(8)}, "saves": {}}
    else:
        told = {"role": "worker", "mode": "async", "steps": steps, "steps_per_s": 40.0, "samples": 512 * steps,
                "samples_per_s": random.gauss(20_000, 100), "queue": 1, "queue_size": 2, "waiting": random.random(),
                "pull_wait_ms": random.random(), "push_wait_ms": random.random(), "memory": 5 * 10**8,
                "metrics": {"loss": random.random(), "auc": random.random()}}
    with open(path + ".part", "w") as file:
        json.dump(told, file)
    os.replace(path + ".part", path)
    time.sleep(0.5)
"""


@contextlib.contextmanager
def job(folder: Path, has_dashboard: bool) -> Iterator[tuple[psutil.Process, int, str]]:
    """The launcher, the port of its dashboard, 0 without one, and its token."""
    script = folder / "role.py"
    script.write_text(_ROLE)
    options = ["--dashboard", "0"] if has_dashboard else []
    command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(folder / "log"), *options]
    command += ["--server_num", "2", "--worker_num", "4", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            port, token, wanted = 0, "", "dashboard: http://127.0.0.1:" if has_dashboard else "logs in"
            line = next(line for line in process.stdout if wanted in line)
            if found := re.search(r"dashboard: http://127.0.0.1:(\d+)\S*#token=([A-Za-z0-9_-]+)", line):
                port, token = int(found[1]), found[2]
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield psutil.Process(process.pid), port, token
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def client(port: int, token: str) -> Iterator[None]:
    """Reads the stream of events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/events", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise RuntimeError(f"the dashboard answered {answer.status} {answer.reason}, expected 200: nothing to measure")

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
            while answer.read1(65536):
                pass

    threading.Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        connection.close()


def measure(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of CPU per second of the job, of every round, by variant."""
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with contextlib.ExitStack() as stack:
        launchers = {}
        for name in VARIANTS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            launcher, port, token = stack.enter_context(job(folder, name != "without"))
            if name == VARIANTS[2]:
                stack.enter_context(client(port, token))
            launchers[name] = launcher
        time.sleep(10)  # all processes have started
        for number in range(rounds):
            before = {name: sum(launcher.cpu_times()[:2]) for name, launcher in launchers.items()}
            begin = time.monotonic()
            time.sleep(seconds)
            for name, launcher in launchers.items():
                used = sum(launcher.cpu_times()[:2]) - before[name]
                found[name].append(used / (time.monotonic() - begin))
            log(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.4f}" for name, values in found.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round")
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds, seconds = (1, 2.0) if options.quick else (options.rounds, options.seconds)
    found = {name: statistics.median(values) for name, values in measure(rounds, seconds).items()}
    report({f"ms of CPU per second, {name}": round(1000 * value, 1) for name, value in found.items()}, options.json)


if __name__ == "__main__":
    main()
