"""What shrinking a large table does to requests: the longest waits of pulls, with and without.

python -m benchmarks.shrink --json                   20 million rows, of which half go: about two minutes
python -m benchmarks.shrink --quick --json           smaller, to see that it works

A client pulls 2,000 keys again and again (of rows that stay), first alone, then while the server shrinks the table; in
turns, so that drift hits both alike. Shrinks of each kind drop a share of the rows, which are made anew after it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.steady_pulls import SteadyPulls
from benchmarks.timing import log, report
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

CHUNK = 1 << 16
PULL = 2_000
DAY = 86_400
START = 20_000 * DAY
SPEC = TableSpec(
    "rows",
    dim=16,
    rule=Rule("adagrad", 0.05),
    initializer=Initializer("uniform", -0.1, 0.1),
    shrink=Shrink(delete_after_unseen_days=1, max_share=1.0),
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shrink", description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.rounds = 500_000, 1
    return chosen


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    alone: list[float] = []
    beside: list[float] = []
    seconds: list[float] = []
    dropped = 0
    with ServerProcess() as process, Client.connect([process.endpoint], role=Role.LAUNCHER) as client:
        client.create_table(SPEC)
        for turn in range(chosen.rounds):
            now = START + 10 * turn * DAY
            client.set_clock(now)
            look_up(client, chosen.rows // 2, chosen.rows)
            client.set_clock(now + 2 * DAY)
            look_up(client, 0, chosen.rows // 2)  # seen now; the other half was last seen two days ago
            with SteadyPulls(process.endpoint, SPEC, chosen.rows // 2, PULL) as quiet:
                time.sleep(1 if chosen.quick else 8)
            with SteadyPulls(process.endpoint, SPEC, chosen.rows // 2, PULL) as busy:
                begun = time.perf_counter()
                dropped = client.shrink("rows", Shrink())["rows"]
                seconds.append(time.perf_counter() - begun)
            alone += quiet.times
            beside += busy.times
            log(
                f"  round {turn + 1}: p99.9 {longest(quiet.times):.2f} ms alone ({len(quiet.times):,} pulls), "
                f"{longest(busy.times):.2f} ms beside a shrink of {seconds[-1]:.1f} s ({len(busy.times):,} pulls)"
            )
    return {
        "rows": chosen.rows,
        "rows_dropped": dropped,
        "shrink_seconds": float(np.median(seconds)),
        "p50_alone_ms": float(np.median(alone)),
        "p50_beside_ms": float(np.median(beside)),
        "p999_alone_ms": longest(alone),
        "p999_beside_ms": longest(beside),
        "p999_ratio": longest(beside) / longest(alone),
        "max_beside_ms": max(beside),
    }


def look_up(client: Client, start: int, stop: int) -> None:
    """A training pull of these keys: they get rows, and are seen."""
    for at in range(start, stop, CHUNK):
        client.pull("rows", np.arange(at, min(at + CHUNK, stop), dtype=np.uint64)).result()


def longest(times: list[float]) -> float:
    """The 99.9th percentile."""
    return float(np.quantile(times, 0.999))


if __name__ == "__main__":
    arguments = options()
    log(f"{arguments.rows:,} rows x dim {SPEC.dim}, {arguments.rounds} rounds")
    report(run(arguments), arguments.json)
