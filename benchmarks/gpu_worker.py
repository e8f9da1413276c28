"""A worker on a GPU with its tables on CPU servers of the same machine, with and without a cache of hot rows.

python -m benchmarks.gpu_worker --json             4 servers, 100 million ids, a cache of 10 % of the rows, batch 16,384
python -m benchmarks.gpu_worker --quick --json     smaller and shorter, to see that it works (--device cpu: no GPU)
python -m benchmarks.gpu_worker --profile --json   also where the time of a step goes

CTR-DNN, 26 ids of dim 16, Adam on rows and network, bfloat16, hybrid mode; ids by Zipf's law, drawn before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rank_jobs import results
from benchmarks.timing import log, report

_JOB = Path(__file__).with_name("gpu_worker_job.py")
_SETTINGS = ("batch", "slots", "dim", "num_ids", "zipf", "warm", "steps", "device", "cached_rows", "eager")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in (("batch", 16384), ("slots", 26), ("dim", 16), ("num_ids", 100_000_000), ("servers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15, help="exponent of the ids' distribution")
    parser.add_argument("--warm", type=int, default=500, help="steps before those that are timed: the cache fills")
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed")
    parser.add_argument("--cached_rows", type=float, default=0.1, help="room of the cache, as a share of the ids")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", type=int, default=0, help="1: do not compile the network")
    parser.add_argument("--without", type=int, default=1, help="0: leave out the run without a cache")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.batch, chosen.num_ids, chosen.warm, chosen.steps, chosen.servers = 256, 20_000, 20, 20, 2
        chosen.cached_rows = 0.5  # the batches under way must fit
    return chosen


def run(chosen: argparse.Namespace, with_cache: bool, profile: bool = False) -> dict[str, Any]:
    settings = {name: getattr(chosen, name) for name in _SETTINGS} | {"profile": int(profile)}
    if not with_cache:
        settings |= {"cached_rows": 0.0, "warm": min(40, chosen.warm), "steps": min(40, chosen.steps)}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as log_dir:
        roles = ["--server_num", str(chosen.servers), "--worker_num", "1", "--log_dir", log_dir]
        command = [sys.executable, "-m", "torchfleet.launch", *roles, "--private", "ipc", str(_JOB), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=chosen.timeout, check=False)
        logs = [path.read_text() for path in (Path(log_dir) / "latest").glob("workerlog.*")]
    found = results("\n".join(logs))
    if done.returncode or len(found) != 1:
        raise SystemExit(f"the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{''.join(logs)[-4000:]}")
    if profile:
        log("\n".join(line for text in logs for line in text.splitlines() if "RESULT" not in line))
    result: dict[str, Any] = found[0]
    log(f"  cache {with_cache}: {result['samples_per_s']:,.0f} samples/s, {result['step_ms']:.2f} ms")
    return result


def main() -> None:
    chosen = options()
    cached = run(chosen, with_cache=True, profile=chosen.profile)
    result: dict[str, Any] = {"worker_samples_per_s": cached["samples_per_s"], "cached": cached}
    if chosen.without:
        plain = run(chosen, with_cache=False)
        result |= {"without_samples_per_s": plain["samples_per_s"], "without": plain}
        result["ratio"] = cached["samples_per_s"] / plain["samples_per_s"]
    report({**result, "servers": chosen.servers, **{name: getattr(chosen, name) for name in _SETTINGS}}, chosen.json)


if __name__ == "__main__":
    main()
