"""How fast `fleet serve` answers: CTR-DNN with 10 million rows, beside a load generator on the same two cores.

single: one sample a request. batch: 32 samples a request. For each, the highest rate that is held with the bound on the
slowest hundredth, counted from the moment at which each request was due. The roof is the same HTTP server around plain
torch, in turns.

--overload: requests at one, two and four times what can be answered (serving_overload.py).

python -m benchmarks.serving --json           python -m benchmarks.serving --quick
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.timing import log, report

NUM_SLOTS, NUM_DENSE, CREATED = 26, 13, 1000
PATH = "/v2/models/model/infer"
BOUNDS_MS = {"single": 10.0, "batch": 25.0}
SAMPLES = {"single": 1, "batch": 32}
FIRST_RATES = {"single": 2000.0, "batch": 400.0}
GOALS = {"single": 5000.0, "batch": 1600.0}
MIN_REQUESTS = 1000  # of a run: the slowest hundredth of fewer is chance
LEAST_RATE = 100.0  # the search for a rate that is held ends here


def make_model(folder: Path, num_rows: int) -> None:
    """Save CTR-DNN with this number of rows: each id is looked up once for training."""
    import torch

    import torchfleet as fleet
    from examples.ctr_dnn.model import CTRDNN, SLOTS

    torch.manual_seed(0)
    fleet.init()
    model = fleet.distributed_model(CTRDNN())
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    for ids in np.array_split(np.arange(num_rows), max(1, num_rows // (NUM_SLOTS * CREATED))):
        columns = torch.from_numpy(np.resize(ids, (-(-len(ids) // NUM_SLOTS), NUM_SLOTS)))
        batch = {name: columns[:, i : i + 1] for i, name in enumerate(SLOTS)}
        model({**batch, "dense_input": torch.zeros(len(columns), NUM_DENSE)})
    fleet.save_inference_model(str(folder))
    fleet.stop_worker()


def write_requests(file: Path, num_rows: int, num_samples: int, num: int = 500) -> None:
    """Bodies of requests with ids at random, one on each line."""
    rng = np.random.default_rng(1)
    with file.open("wb") as out:
        for _ in range(num):
            ids = rng.integers(0, num_rows, (num_samples, NUM_SLOTS))
            inputs = [
                {"name": f"C{i + 1}", "datatype": "INT64", "shape": [num_samples, 1], "data": ids[:, i].tolist()}
                for i in range(NUM_SLOTS)
            ]
            dense = rng.random((num_samples, NUM_DENSE)).round(4).reshape(-1).tolist()
            shape = [num_samples, NUM_DENSE]
            inputs.append({"name": "dense_input", "datatype": "FP32", "shape": shape, "data": dense})
            out.write(msgspec.json.encode({"inputs": inputs}) + b"\n")


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server, from the moment at which it answers."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{' '.join(command)} does not answer")
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        process.wait(30)


def load(port: int, requests: Path, rate: float, seconds: float, connections: int) -> dict[str, float]:
    """Figures of one run of the load generator, in a process of its own. At least MIN_REQUESTS are sent."""
    seconds = max(seconds, MIN_REQUESTS / rate)
    return generated(port, requests, connections, rate=rate, seconds=seconds)


def generated(port: int, requests: Path, connections: int, **chosen: float) -> dict[str, float]:
    """Figures of `python -m benchmarks.serving_load` with these options."""
    options = ["--port", str(port), "--requests", str(requests), "--path", PATH, "--connections", str(connections)]
    options += [text for name, value in chosen.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.serving_load", *options]
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300 + 3 * chosen.get("seconds", 0.0))
    found: dict[str, float] = json.loads(made.stdout)
    return found


def highest_rate(port: int, requests: Path, kind: str, chosen: argparse.Namespace) -> dict[str, float]:
    """The highest rate that is held within the bound, to a twentieth: doubled until it is not, then halved."""
    low, high, best = 0.0, 0.0, {"rps": 0.0, "p99_ms": float("inf")}
    rate = FIRST_RATES[kind]
    while not high or high / max(low, 1) > 1.05:
        found = load(port, requests, rate, chosen.seconds, chosen.connections)
        is_held = found["p99_ms"] <= BOUNDS_MS[kind] and found["rps"] >= 0.97 * rate and not found["failed"]
        log(f"  {kind} at {rate:,.0f}/s: " + ", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
        if is_held:
            low, best = rate, {**found, "offered": rate}
        else:
            high = rate
        rate = rate * 2 if not high else (low + high) / 2 if low else rate / 2
        if rate < LEAST_RATE:
            break
    return best


def at_goal(
    process: psutil.Process, port: int, requests: Path, kind: str, chosen: argparse.Namespace
) -> dict[str, float]:
    """At the rate that is the goal: the slowest hundredth, processor time of a request in the server and the load
    generator, and the share of the time in which the server was ready to run and had to wait for a core.
    """
    servers = [process, *process.children()]
    before, waited, began = sum(sum(server.cpu_times()[:2]) for server in servers), core_wait(servers), time.monotonic()
    found = load(port, requests, GOALS[kind], chosen.seconds, chosen.connections)
    used = sum(sum(server.cpu_times()[:2]) for server in servers) - before
    return {
        "goal_rps": found["rps"],
        "goal_p99_ms": found["p99_ms"],
        "goal_late_p99_ms": found["late_p99_ms"],
        "cpu_us": 1e6 * used / (GOALS[kind] * chosen.seconds),
        "client_us": found["client_us"],
        "core_wait": (core_wait(servers) - waited) / (time.monotonic() - began),
    }


def core_wait(processes: list[psutil.Process]) -> float:
    """Seconds for which their main threads were ready to run while other threads had the cores."""
    return sum(int(Path(f"/proc/{found.pid}/schedstat").read_text().split()[1]) for found in processes) / 1e9


def measure(name: str, command: list[str], port: int, work: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with running(command, port) as process:
        for kind in chosen.kinds:
            requests = work / f"{kind}.jsonl"
            load(port, requests, FIRST_RATES[kind] / 2, 1.0, chosen.connections)  # warms caches and connections
            goal = at_goal(psutil.Process(process.pid), port, requests, kind, chosen)
            log(f"  {kind} at the goal of {GOALS[kind]:,.0f}/s: " + ", ".join(f"{k} {v:,.1f}" for k, v in goal.items()))
            best = highest_rate(port, requests, kind, chosen)
            result |= {f"{name}{kind}_rps": best["rps"], f"{name}{kind}_p99_ms": best["p99_ms"]}
            result |= {f"{name}{kind}_{figure}": value for figure, value in goal.items()}
    return result


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="100,000 rows and short runs: only shows that it works")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run of the load generator")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="serving processes")
    parser.add_argument("--batch_wait_ms", type=float, default=2.0)
    parser.add_argument("--no_roof", action="store_true")
    parser.add_argument("--overload", action="store_true", help="only 1, 2 and 4 times what can be answered")
    parser.add_argument("--kinds", nargs="+", choices=[*GOALS], default=[*GOALS])
    parser.add_argument("--model", type=Path, help="keep the model in this folder, and use it if it is there")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.seconds = 100_000, 1.0
    return chosen


def main() -> None:
    from benchmarks.serving_overload import overload_figures  # which uses this module

    chosen = options()
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        folder = (chosen.model or work) / "model"
        if not folder.exists():
            log(f"making a model of {chosen.rows:,} rows")
            make_model(folder, chosen.rows)
        if chosen.overload:
            found = overload_figures(work, folder, chosen.rows, chosen.seconds)
            report({**found, "rows": chosen.rows, "cores": len(os.sched_getaffinity(0))}, chosen.json)
            return
        for kind, num in SAMPLES.items():
            write_requests(work / f"{kind}.jsonl", chosen.rows, num)
        port = free_port()
        flags = ["--workers", str(chosen.workers), "--batch_wait_ms", str(chosen.batch_wait_ms)]
        serve = ["torchfleet.observe.commands", "serve", str(folder), "--port", str(port), *flags]
        result = measure("", serve, port, work, chosen)
        if not chosen.no_roof:
            log("the same around plain torch")
            port = free_port()
            roof = ["benchmarks.serving_roof", str(folder), str(port), str(chosen.rows)]
            result |= measure("roof_", roof, port, work, chosen)
            for kind, name in (("single", "roof_ratio"), ("batch", "roof_batch_ratio")):
                if kind in chosen.kinds:
                    result[name] = result[f"{kind}_rps"] / max(1.0, result[f"roof_{kind}_rps"])
    settings = {"rows": chosen.rows, "workers": chosen.workers, "batch_wait_ms": chosen.batch_wait_ms}
    report({**result, **settings, "cores": len(os.sched_getaffinity(0))}, chosen.json)


if __name__ == "__main__":
    main()
