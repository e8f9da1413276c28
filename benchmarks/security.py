"""What it costs to keep others out: the quick start trained plain, with keys and over sockets of the job, in turns;
and bare pulls as the worst case.

python -m benchmarks.security --json          about three minutes
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.timing import interleave, rate, report
from torchfleet.ps.net.keys import KeyFolder, keygen
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client

_SCRIPT = Path(__file__).parent.parent / "examples" / "wide_deep" / "train.py"
_BATCH, _PULLS = 26_000, 60
_LOOPBACK = "tcp://127.0.0.1:0"
WAYS = {"plain": ["--plain"], "curve": ["--private", "keys"], "ipc": ["--private", "ipc"]}  # options of fleetrun


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.security", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000, help="rows that the quick start trains on")
    parser.add_argument("--mode", default="async", choices=["sync", "half_async", "async"])
    parser.add_argument("--pulls_only", action="store_true", help="bare pulls, without training")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def trained(chosen: argparse.Namespace, *way: str) -> tuple[float, float]:
    """Samples per second of a worker beside one server, and processor seconds of the whole job."""
    before = os.times()
    with tempfile.TemporaryDirectory() as log_dir:
        roles = ["--server_num", "1", "--worker_num", "1", "--log_dir", log_dir]
        script = [str(_SCRIPT), "--rows", str(chosen.rows), "--mode", chosen.mode]
        command = [sys.executable, "-m", "torchfleet.launch", *roles, *way, *script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r"([\d,]+) samples/s on this worker", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"training failed:\n{done.stdout}\n{done.stderr}")
    after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return float(found.group(1).replace(",", "")), spent


def pulled(endpoint: str, key_dir: str | None) -> tuple[float, float]:
    """Bare pulls of 1 MB replies, nothing else: keys per second, and processor milliseconds of server and client for a
    pull. The most that encryption can cost."""
    arguments = ["--key_dir", key_dir] if key_dir else []
    keys = KeyFolder(key_dir) if key_dir else None
    with (
        ServerProcess(endpoint, *arguments) as server,
        Client.connect([server.endpoint], keys, role=Role.FIRST_WORKER) as client,
    ):
        client.create_table(TableSpec("rows", dim=10))
        wanted = np.arange(_BATCH, dtype=np.uint64)
        client.pull("rows", wanted).result()

        def pull_all() -> None:
            for future in [client.pull("rows", wanted) for _ in range(_PULLS)]:
                future.result()

        before = _processor_seconds(server.pid)
        keys_per_s = rate(_BATCH * _PULLS, pull_all)
        return keys_per_s, (_processor_seconds(server.pid) - before) / _PULLS * 1000


def _processor_seconds(server: int) -> float:
    times = psutil.Process(server).cpu_times()
    return float(times.user + times.system) + time.process_time()


def main() -> None:
    chosen = options()
    spent: dict[str, list[float]] = defaultdict(list)

    def noted(name: str, measure: Callable[[], tuple[float, float]]) -> float:
        speed, cost = measure()
        spent[name].append(cost)
        return speed

    with tempfile.TemporaryDirectory() as folder:
        key_dir = str(Path(folder) / "keys")
        keygen(key_dir)
        places = {"plain": (_LOOPBACK, None), "curve": (_LOOPBACK, key_dir), "ipc": (f"ipc://{folder}/server", None)}
        runs = {f"{name}_pull_keys_per_s": partial(noted, f"{name}_pull_cpu_ms", partial(pulled, *place))
                for name, place in places.items()}  # fmt: skip
        if not chosen.pulls_only:
            runs |= {f"{name}_samples_per_s": partial(noted, f"{name}_cpu_s", partial(trained, chosen, *way))
                     for name, way in WAYS.items()}  # fmt: skip
        found = interleave(chosen.rounds, runs)
    found |= {name: statistics.median(costs) for name, costs in spent.items()}
    for name, title in (("curve", ""), ("ipc", "ipc_")):
        found[f"{title}pull_ratio"] = found[f"{name}_pull_keys_per_s"] / found["plain_pull_keys_per_s"]
        found[f"{title}pull_cpu_ratio"] = found["plain_pull_cpu_ms"] / found[f"{name}_pull_cpu_ms"]
        if not chosen.pulls_only:
            found[f"{title}training_ratio"] = found[f"{name}_samples_per_s"] / found["plain_samples_per_s"]
            found[f"{title}training_cpu_ratio"] = found["plain_cpu_s"] / found[f"{name}_cpu_s"]
    report({**found, **{name: value for name, value in vars(chosen).items() if name != "json"}}, chosen.json)


if __name__ == "__main__":
    main()
