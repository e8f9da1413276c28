"""What servers cost before the first row: time until all of them run, processor time and memory.

    python -m benchmarks.startup --json                        2 and 64 servers on this machine
    python -m benchmarks.startup --servers 2 8 --ways script bare forked

Three ways to start the same servers: `script`, each runs the training script and imports torch; `bare`, each is an
interpreter of its own without the script; `forked`, as fleetrun does it: forked by one process that has imported what
servers need. A worker declares a small table and makes a step, so that all servers serve. Memory is the sum of the
proportional shares (PSS) of all processes but the worker, in which a page that n processes share counts 1/n in each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

WAYS = {
    "script": (["--servers_run_script"], "0"),
    "bare": ([], "0"),
    "forked": ([], "1"),
}
_SCRIPT = """
import sys, time
from pathlib import Path
import torch
import torchfleet as fleet

fleet.init()
model = fleet.distributed_model(torch.nn.Sequential(fleet.nn.SparseEmbedding(8, name="rows"), torch.nn.Linear(8, 1)))
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    model(torch.arange(100)).sum().backward()
    optimizer.step()
    print("trained", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.1)
    fleet.stop_worker()
"""
_MOST_SECONDS = 900.0


def measure(num_servers: int, way: str) -> dict[str, float]:
    """Start a job in this way, look at its servers when they serve, and end it."""
    flags, forks = WAYS[way]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(_SCRIPT)
        end = folder / "end"
        command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(folder / "log"), *flags]
        command += ["--server_num", str(num_servers), "--worker_num", "1", str(folder / "train.py"), str(end)]
        began = time.monotonic()
        with open(folder / "output", "wb") as output:
            launcher = subprocess.Popen(
                command, env={**os.environ, "FLEET_FORK_SERVERS": forks}, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            logs = folder / "log" / "latest"
            servers = [logs / f"serverlog.{i}" for i in range(num_servers)]
            listening = _wait(lambda: all(_says(log, "listening on") for log in servers), launcher) - began
            serving = _wait(lambda: _says(logs / "workerlog.0", "trained"), launcher) - began
            found = _looked_at(launcher.pid, logs, num_servers)
        finally:
            end.touch()
            launcher.wait(120)
        return {"listening_s": listening, "serving_s": serving, **found}


def _says(log: Path, text: str) -> bool:
    with contextlib.suppress(OSError):
        return text in log.read_text()
    return False


def _wait(is_so: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + _MOST_SECONDS
    while not is_so():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the job has ended, or does not start: see its logs")
        time.sleep(0.02)
    return time.monotonic()


def _looked_at(launcher: int, logs: Path, num_servers: int) -> dict[str, float]:
    """Memory of the servers, and the processor time of all that was started except the worker, in seconds."""
    pids = {json.loads((logs / f".status.server.{i}").read_text())["pid"] for i in range(num_servers)}
    worker = json.loads((logs / ".status.worker.0").read_text())["pid"]
    below = [process for process in psutil.Process(launcher).children(recursive=True) if process.pid != worker]
    memory = [process.memory_full_info() for process in below]
    spent = [process.cpu_times() for process in below]
    resident = [psutil.Process(pid).memory_info().rss for pid in pids]
    return {
        "processor_s": sum(times.user + times.system for times in spent),
        "pss_mb": sum(info.pss for info in memory) / 1e6,
        "rss_mb_each": statistics.median(resident) / 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 64])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument(
        "--most_scripts", type=int, default=8, help="more servers than this are not started by a script"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two servers, one round, without the script")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.servers, options.ways, options.rounds = [2], ["bare", "forked"], 1
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for num_servers in options.servers:
            for way in options.ways:
                if way != "script" or num_servers <= options.most_scripts:
                    found.setdefault(f"{num_servers} {way}", []).append(measure(num_servers, way))
    result: dict[str, Any] = {
        name: {what: round(statistics.median(each[what] for each in rounds), 2) for what in rounds[0]}
        for name, rounds in found.items()
    }
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), **result}, indent=1))
        return
    for name, values in result.items():
        print(f"{name:12}", ", ".join(f"{what} {value:,.1f}" for what, value in values.items()))


if __name__ == "__main__":
    main()
