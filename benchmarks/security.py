"""What encryption costs: the quick start trained plain and with CURVE keys, in turns; and bare pulls as the worst case.

python -m benchmarks.security --json          about two minutes
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.timing import interleave, rate, report
from torchfleet.net.keys import KeyFolder, keygen
from torchfleet.net.wire import Role
from torchfleet.server.process import ServerProcess
from torchfleet.tables.settings.spec import TableSpec
from torchfleet.worker.client.client import Client

_SCRIPT = Path(__file__).parent.parent / "examples" / "wide_deep" / "train.py"
_BATCH, _PULLS = 26_000, 60


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.security", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000, help="rows that the quick start trains on")
    parser.add_argument("--mode", default="async", choices=["sync", "half_async", "async"])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def trained_samples_per_s(chosen: argparse.Namespace, key_dir: str | None) -> float:
    """Samples per second of a worker beside one server."""
    with tempfile.TemporaryDirectory() as log_dir:
        roles = ["--server_num", "1", "--worker_num", "1", "--log_dir", log_dir]
        keys = ["--key_dir", key_dir] if key_dir else []
        script = [str(_SCRIPT), "--rows", str(chosen.rows), "--mode", chosen.mode]
        command = [sys.executable, "-m", "torchfleet.launch", *roles, *keys, *script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r"([\d,]+) samples/s on this worker", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"training failed:\n{done.stdout}\n{done.stderr}")
    return float(found.group(1).replace(",", ""))


def pulled_keys_per_s(key_dir: str | None) -> float:
    """Bare pulls of 1 MB replies, nothing else: the most that encryption can cost."""
    arguments = ["--key_dir", key_dir] if key_dir else []
    keys = KeyFolder(key_dir) if key_dir else None
    with (
        ServerProcess("tcp://127.0.0.1:0", *arguments) as server,
        Client.connect([server.endpoint], keys, role=Role.FIRST_WORKER) as client,
    ):
        client.create_table(TableSpec("rows", dim=10))
        wanted = np.arange(_BATCH, dtype=np.uint64)
        client.pull("rows", wanted).result()

        def pull_all() -> None:
            for future in [client.pull("rows", wanted) for _ in range(_PULLS)]:
                future.result()

        return rate(_BATCH * _PULLS, pull_all)


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory() as folder:
        key_dir = str(Path(folder) / "keys")
        keygen(key_dir)
        found = interleave(
            chosen.rounds,
            {
                "plain_samples_per_s": lambda: trained_samples_per_s(chosen, None),
                "curve_samples_per_s": lambda: trained_samples_per_s(chosen, key_dir),
                "plain_pull_keys_per_s": lambda: pulled_keys_per_s(None),
                "curve_pull_keys_per_s": lambda: pulled_keys_per_s(key_dir),
            },
        )
    found["training_ratio"] = found["curve_samples_per_s"] / found["plain_samples_per_s"]
    found["pull_ratio"] = found["curve_pull_keys_per_s"] / found["plain_pull_keys_per_s"]
    report({**found, **{name: value for name, value in vars(chosen).items() if name != "json"}}, chosen.json)


if __name__ == "__main__":
    main()
