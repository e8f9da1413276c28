"""What watching costs: processor time and speed of a job with all of it on, against the same job unwatched.

python -m benchmarks.watching --json            2 servers x 4 workers, async; two and a half minutes
python -m benchmarks.watching --quick --json    shorter, to see that it works
python -m benchmarks.watching --runs 4 --json   whole runs in turns as well, with loss and AUC of both

All of it: fleetrun on a terminal, with --dashboard and a page that is open, --metrics_port and a scrape of every
process each second, --tensorboard, the record, and --trace_every where opentelemetry is installed (`traces` says
whether). Every worker reports its loss every tenth step.

parts      all of it is on for a while: the processor time of what watches, counted where it runs, as shares of what
           servers and workers use. `fleetrun` is all that its process uses.
switched   servers and workers of the same job are watched and not watched in turns, every half second: the same
           processes, the same memory, neighbouring windows in pairs. One that is not watched does as a process
           without a launcher. fleetrun goes on meanwhile; it is no part of these figures.
runs       whole jobs: under fleetrun with all of it, and as roles without a launcher. Both train the same number of
           steps, so that loss and AUC, on held-out batches, can be compared.

`cpu` is the processor time of a step, of all processes of the job, watched / unwatched: what watching costs where no
core is free. `speed` is steps a second, the same way: what it costs where cores are free. Each has the median of the
pairs, and the ratio of the sums over all pairs, both with an interval of 95 % (bootstrap). `cost` is what a step of the
job pays in all: servers and workers as they are switched, and fleetrun. Where there are two cores for each server and
worker and two more, each is kept on two of its own (`pinned`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.timing import log, report
from benchmarks.watching_jobs import HAS_TRACES, Job, Look, own_cores, unwatched, watched

_SETTLE = 0.05  # seconds after a switch that belong to no window
_RESAMPLED = 4000
_PARTS = ("statuses", "status_files", "metrics_ports", "trace_export")  # of servers and workers
Pair = tuple[Look, Look]  # watched, unwatched


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("servers", 2), ("workers", 4), ("batch", 512), ("num_ids", 200_000), ("trace_every", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=150.0, help="of all of it but whole runs")
    parser.add_argument("--steady", type=float, default=20.0, help="seconds in which all is on, for the parts")
    parser.add_argument("--window", type=float, default=0.5, help="seconds between two switches")
    parser.add_argument("--runs", type=int, default=0, help="pairs of whole runs")
    parser.add_argument("--steps", type=int, default=1500, help="of a worker in a whole run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.num_ids, chosen.seconds, chosen.steady, chosen.steps = 20_000, 10.0, 3.0, 100
    return chosen


def switched(chosen: argparse.Namespace, until: float) -> tuple[list[Pair], dict[str, float]]:
    """Windows of one job, in pairs, and the shares of what watches it. Which of a pair comes first changes."""
    pairs: list[Pair] = []
    with watched(chosen, 0) as job:
        job.wait_until("trains", 1)
        time.sleep(_SETTLE)
        shares = parts(job, chosen.steady)
        log("  " + ", ".join(f"{name} {share:.3%}" for name, share in shares.items()))
        while len(pairs) < 3 or time.monotonic() < until:
            found = {wanted: window(job, wanted, chosen.window) for wanted in _in_turns(len(pairs), (True, False))}
            pairs.append((found[True], found[False]))
            if len(pairs) % 25 == 0:
                log(f"  {len(pairs)} pairs: {cpu(pairs) - 1:+.2%} processor time, {speed(pairs) - 1:+.2%} speed")
        job.watch(True)
    return pairs, shares


def window(job: Job, wanted: bool, seconds: float) -> Look:
    job.watch(wanted)
    time.sleep(_SETTLE)
    before = job.look(with_fleetrun=False)
    time.sleep(seconds)
    return job.look(with_fleetrun=False).since(before)


def parts(job: Job, seconds: float) -> dict[str, float]:
    """What watches, as shares of the processor time of servers and workers."""
    before, told = job.look(), {name: sum(job.board.of(f"{name}_s")) for name in _PARTS}
    time.sleep(seconds)
    found = job.look().since(before)
    used = {name: sum(job.board.of(f"{name}_s")) - told[name] for name in _PARTS}
    return {name: seconds / found.roles_s for name, seconds in {**used, "fleetrun": found.fleetrun_s}.items()}


def whole_runs(chosen: argparse.Namespace) -> tuple[list[Pair], dict[str, list[float]]]:
    """Whole jobs in turns; and the loss and AUC of each, means of the workers."""
    learned: dict[str, list[float]] = {}
    pairs: list[Pair] = []
    for number in range(chosen.runs):
        found = dict[str, Look]()
        for name in _in_turns(number, tuple(_RUNS)):
            with _RUNS[name](chosen, chosen.steps) as job:
                found[name] = whole_run(job, chosen.steps)
            for what in ("loss", "auc"):
                mean = statistics.fmean(job.board.of(what, chosen.servers))
                learned.setdefault(f"{name}_{what}", []).append(round(mean, 5))
        pairs.append((found["watched"], found["unwatched"]))
        log(f"  run {number + 1}: {cpu(pairs[-1:]) - 1:+.2%} processor time, {speed(pairs[-1:]) - 1:+.2%} speed")
    return pairs, learned


def whole_run(job: Job, steps: int) -> Look:
    """From when all workers train until the first one has made its steps."""
    job.wait_until("trains", 1)
    before = job.look()
    while max(job.board.of("steps", job.num_servers)) < steps:
        job.check()
        time.sleep(0.01)
    return job.look().since(before)


def _in_turns(number: int, both: Sequence[Any]) -> Sequence[Any]:
    return both if number % 2 == 0 else both[::-1]


def cpu(pairs: Sequence[Pair]) -> float:
    """Processor time of a step, watched / unwatched, over all of these pairs."""
    return _ratio(pairs, lambda look: look.processor_s, lambda look: look.steps)


def speed(pairs: Sequence[Pair]) -> float:
    """Steps a second, the same way."""
    return _ratio(pairs, lambda look: look.steps, lambda look: look.time)


def _ratio(pairs: Sequence[Pair], much: Callable[[Look], float], per: Callable[[Look], float]) -> float:
    on, off = (sum(much(pair[i]) for pair in pairs) / sum(per(pair[i]) for pair in pairs) for i in (0, 1))
    return on / off


def compared(pairs: Sequence[Pair], ratio: Callable[[Sequence[Pair]], float]) -> dict[str, Any]:
    """The median of the pairs and the ratio of their sums, each with its interval of 95 %."""
    each = np.array([ratio([pair]) for pair in pairs])
    drawn = np.random.default_rng(0).integers(len(pairs), size=(_RESAMPLED, len(pairs)))
    sums = [ratio([pairs[i] for i in draw]) for draw in drawn]
    intervals = (np.percentile(values, (2.5, 97.5)) for values in (np.median(each[drawn], axis=1), sums))
    found = zip(("median", "sums"), (float(np.median(each)), ratio(pairs)), intervals, strict=True)
    told = {name: [round(float(value), 5) for value in (middle, *ends)] for name, middle, ends in found}
    return {**told, "pairs": len(pairs)}


def main() -> None:
    chosen, begin = options(), time.monotonic()
    with own_cores(chosen.servers + chosen.workers) as is_pinned:
        windows, shares = switched(chosen, begin + chosen.seconds)
        runs, learned = whole_runs(chosen)
    rows = {"switched_cpu": (windows, cpu), "switched_speed": (windows, speed)}
    rows |= {"runs_cpu": (runs, cpu), "runs_speed": (runs, speed)}
    result: dict[str, Any] = {name: compared(pairs, ratio) for name, (pairs, ratio) in rows.items() if pairs}
    result["cost"] = [round(value - 1 + shares["fleetrun"], 5) for value in result["switched_cpu"]["sums"]]
    result["parts"] = {name: round(share, 6) for name, share in shares.items()}
    result["parts_sum"] = round(sum(shares.values()), 6)
    off = [look for _, look in windows]
    steps = sum(look.steps for look in off)
    result["samples_per_s"] = chosen.batch * steps / sum(look.time for look in off)
    result["step_cpu_ms"] = 1000 * sum(look.processor_s for look in off) / steps
    result |= {**learned, "traces": HAS_TRACES, "pinned": is_pinned}
    result |= {"servers": chosen.servers, "workers": chosen.workers, "seconds": round(time.monotonic() - begin)}
    report(result, chosen.json)


_RUNS = {"watched": watched, "unwatched": unwatched}


if __name__ == "__main__":
    main()
