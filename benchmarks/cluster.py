"""A job on a cluster of Ray on this machine against local processes: time to the first steps, speed, quality.

python -m benchmarks.cluster --json            CTR-DNN, async, 1 server x 2 workers, five rounds in turns
python -m benchmarks.cluster --quick --json    one round of few rows, to see that it works

Both run the same script with keys on TCP, with as many threads. Ray's workers have the priority of other processes:
by default it starts them with niceness 15.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.timing import log, report
from torchfleet.launch.clusters.on_ray.ray_cluster import require_ray

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "ctr_dnn"
PROGRESS = 20  # steps until the first line of progress
_SETTINGS = {"worker_niceness": 0, "worker_register_timeout_seconds": 300}
_MEMORY = 100 << 20  # of a node's object store


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch_size", type=int, default=1000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.rows, chosen.batch_size = 1, 8_000, 100
    return chosen


@contextlib.contextmanager
def cluster(folder: str) -> Iterator[str]:
    """The address of a head without cores and one node, whose loopback address is its own."""
    require_ray()
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
    Path(folder, "ray").mkdir()
    made: Any = Cluster()
    try:
        common = {"object_store_memory": _MEMORY}
        made.add_node(num_cpus=0, temp_dir=f"{folder}/ray", include_dashboard=False, _system_config=_SETTINGS, **common)
        made.add_node(num_cpus=4, node_ip_address="127.0.0.2", **common)
        yield str(made.address)
    finally:
        made.shutdown()


def run(folder: Path, name: str, flags: list[str], chosen: argparse.Namespace) -> dict[str, float]:
    """One job: seconds to its first line of progress, samples a second of worker 0, test AUC."""
    command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(folder / name), *flags, "--server_num", "1"]
    command += ["--worker_num", "2", str(EXAMPLE / "train.py"), "--data", str(folder / "data"), "--mode", "async"]
    command += ["--epochs", "1", "--batch_size", str(chosen.batch_size), "--print_period", str(PROGRESS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started, first, told = time.monotonic(), 0.0, ""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            told += line
            if not first and f"step {PROGRESS}" in line:
                first = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"the job failed:\n{told}")
    speed = re.search(r"epoch 1: ([\d,]+) samples/s", told)
    auc = re.search(r"test AUC ([\d.]+)", told)
    assert speed is not None
    assert auc is not None, told
    return {"start_s": first, "samples_per_s": float(speed[1].replace(",", "")), "auc": float(auc[1])}


def main() -> None:
    chosen = options()
    found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short, tempfile.TemporaryDirectory() as folder:
        prepare = [sys.executable, str(EXAMPLE / "prepare.py"), "--rows", str(chosen.rows), "--out", f"{folder}/data"]
        subprocess.run(prepare, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
        with cluster(short) as address:
            flags = {"local": ["--private", "keys"], "ray": ["--cluster", f"ray={address}"]}
            for turn in range(chosen.rounds):
                for name, more in flags.items():
                    found[name].append(run(Path(folder), name, more, chosen))
                    log(f"  round {turn + 1}/{chosen.rounds}: {name} {found[name][-1]}")
    medians = {
        f"{name}_{figure}": statistics.median(each[figure] for each in runs)
        for name, runs in found.items()
        for figure in ("start_s", "samples_per_s", "auc")
    }
    pairs = zip(found["ray"], found["local"], strict=True)
    ratio = statistics.median(ray["samples_per_s"] / local["samples_per_s"] for ray, local in pairs)
    report({**medians, "training_ratio": ratio, **vars(chosen)}, chosen.json)


if __name__ == "__main__":
    main()
