"""Hybrid mode's exchange of the network, through the servers and among ranks, beside plain DistributedDataParallel.

python -m benchmarks.hybrid --json                       8 workers: speeds, a table of a step, one worker slowed, AUC
python -m benchmarks.hybrid --parts speed --json         some of: speed, straggler, simulated, uneven, auc, kills
python -m benchmarks.hybrid --quick --json               2 workers, few steps, to see that it works

servers_ratio, ranks_ratio   samples/s with rows over those of DistributedDataParallel on the same network without rows
step_ms, alone_ms            where a step of `servers` goes, with all workers and with one; the parts add up to the step
lost                         where the rest of n × one worker goes: shares that add up to 1 with `efficiency`
straggler_ratio              one worker slowed five times, with balance, over the sum of the workers' speeds
simulated_ms_8, ..._32       where a step goes in virtual time, with every process on a machine of its own
quorum_ratio                 the same, with a quorum of all but one; gradients that were dropped do not count
straggler_auc, quorum_auc    with balance and with the quorum; servers_auc: of workers that are alike; `trained`: the
                             samples behind each. Rounds have seeds of their own, and no sample is trained twice
auc                          by number of workers, hybrid and sync at the same global batch: the mean, and every seed;
                             with several --auc_rates also the best rate and epoch of each, by the mean of the seeds
uneven                       one worker slowed, simulated: AUC at equal samples beside that of workers that are alike
kills                        20 workers killed, which join again: the longest pause of another worker, and AUC
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks import hybrid_auc, hybrid_kills, hybrid_uneven
from benchmarks.hybrid_runs import (
    Found,
    auc,
    dropped_share,
    lost_table,
    median_speed,
    rounded,
    run,
    slow_factor,
    speed,
    step_table,
    trained,
)
from benchmarks.timing import log, report

ALONE = "alone"  # one worker through the servers
PARTS = ("speed", "straggler", "simulated", "uneven", "auc", "kills")
SIMULATED = 32  # workers
SLOWED = ("ddp", "servers", "balance", "quorum")  # ways with a slow worker
Runs = dict[str, list[Found]]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1000, help="samples of one worker in one step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=5.0, help="how many times slower the slow worker is")
    parser.add_argument("--by", choices=["busy", "sleep", "cpu"], default="busy", help="how it is slowed")
    parser.add_argument("--straggler_rounds", type=int, default=1)
    parser.add_argument("--straggler_ways", nargs="+", default=list(SLOWED), choices=SLOWED)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further round begins")
    hybrid_auc.add_options(parser)
    hybrid_kills.add_options(parser)
    hybrid_uneven.add_options(parser)
    parser.add_argument("--quick", action="store_true", help="2 workers, 5 steps, one round, without AUC and kills")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.workers, chosen.steps, chosen.rounds, chosen.batch = 2, 5, 1, 100
        chosen.parts = [part for part in chosen.parts if part in ("speed", "straggler")]
    return chosen


def main() -> None:
    chosen = options()
    found: Runs = {"ddp": [], "servers": [], "ranks": [], ALONE: []}
    slowed: Runs = {way: [] for way in chosen.straggler_ways}
    result: dict[str, Any] = {}
    if "speed" in chosen.parts or "straggler" in chosen.parts:
        in_turns(chosen, found, slowed)
        result |= summary(found, slowed, chosen.factor)
    if "simulated" in chosen.parts:
        result |= simulated(chosen)
    if "auc" in chosen.parts:
        result["auc"] = hybrid_auc.measure(chosen)
    if "uneven" in chosen.parts:
        result["uneven"] = hybrid_uneven.measure(chosen)
    if "kills" in chosen.parts:
        result["kills"] = hybrid_kills.measure(chosen)
    report({**result, **settings(chosen)}, chosen.json)


def in_turns(chosen: argparse.Namespace, found: Runs, slowed: Runs) -> None:
    """Fill `found` and `slowed`: all ways once, then with a slow worker, then again. The limit ends it early."""
    begun = time.monotonic()
    num_slowed = chosen.straggler_rounds if "straggler" in chosen.parts else 0
    for turn in range(max(chosen.rounds, num_slowed)):
        if turn and time.monotonic() - begun > chosen.limit:
            log(f"  {chosen.limit:.0f} s have passed: {turn} rounds")
            return
        if turn < chosen.rounds:
            for way, runs in found.items():
                is_alone = way == ALONE
                num = 1 if is_alone else chosen.workers
                runs.append(run("servers" if is_alone else way, chosen, num, seed=turn))
                log_speed(f"{way}, round {turn + 1}/{chosen.rounds}", runs[-1], begun)
        if turn < num_slowed:
            for way, runs in slowed.items():
                runs.append(run(way, chosen, chosen.workers, is_slowed=True, seed=turn))
                log_speed(f"{way}, one slowed, round {turn + 1}/{num_slowed}", runs[-1], begun)
        log(f"  so far: {json.dumps(summary(found, slowed, chosen.factor))}")


def simulated(chosen: argparse.Namespace) -> dict[str, Any]:
    """The same in virtual time, every process on a machine of its own: speeds, and where a step goes."""
    result: dict[str, Any] = {"simulated_samples_per_s": {}}
    for num in (chosen.workers, SIMULATED):
        for way in ("servers", "ranks"):
            begun = time.monotonic()
            workers = run(way, chosen, num, is_simulated=True)
            log_speed(f"{way}, {num} workers, simulated", workers, begun)
            result["simulated_samples_per_s"][f"{way}_{num}"] = speed(workers)
            if way == "servers":
                result[f"simulated_ms_{num}"] = rounded(step_table([workers]))
                log(f"    {result[f'simulated_ms_{num}']}")
    return result


def log_speed(what: str, workers: Found, begun: float) -> None:
    log(f"  {what}: {speed(workers):,.0f} samples/s, after {time.monotonic() - begun:.0f} s")


def summary(found: Runs, slowed: Runs, factor: float) -> dict[str, Any]:
    speeds = {way: median_speed(runs) for way, runs in found.items()}
    result: dict[str, Any] = {f"{way}_samples_per_s": value for way, value in speeds.items()}
    result |= {f"{way}_ratio": speeds[way] / speeds["ddp"] for way in ("servers", "ranks")}
    result |= {f"{way}_auc": auc(found[way]) for way in ("servers", "ranks")}
    result["trained"] = {"servers": trained(found["servers"])}
    result["trained"] |= {way: trained(slowed[way]) for way in ("balance", "quorum") if slowed.get(way)}
    together, alone = step_table(found["servers"]), step_table(found[ALONE])
    result |= {"step_ms": rounded(together), "alone_ms": rounded(alone), "lost": rounded(lost_table(alone, together))}
    num = found["servers"][0][0]["workers"]
    possible = (num - 1 + 1 / factor) / num  # of the speed of even workers
    for way, name in (("balance", ""), ("servers", "_unbalanced"), ("ddp", "_ddp")):
        if slowed.get(way):
            even = speeds["ddp" if way == "ddp" else "servers"]
            result[f"straggler_ratio{name}"] = median_speed(slowed[way]) / (even * possible)
            result |= {"straggler_auc": auc(slowed[way])} if way == "balance" else {}
    if slowed.get("servers"):
        result["straggler_factor"] = slow_factor(slowed["servers"])
    if slowed.get("quorum"):
        shares = [dropped_share(workers) for workers in slowed["quorum"]]
        taken = median_speed(slowed["quorum"]) * (1 - statistics.median(shares))
        result |= {"quorum_ratio": taken / (speeds["servers"] * possible), "quorum_auc": auc(slowed["quorum"])}
        result["quorum_samples"] = slowed["quorum"][-1][0]["quorum"]["samples"]
    return result


def settings(chosen: argparse.Namespace) -> dict[str, Any]:
    names = ("parts", "workers", "servers", "batch", "steps", "rounds", "factor", "by")
    return {name: getattr(chosen, name) for name in names}


if __name__ == "__main__":
    main()
