"""What watching costs: processor time and speed of a job with all of it on, against the same job with nobody looking.

python -m benchmarks.watching --json            2 servers x 4 workers, async; four minutes at most
python -m benchmarks.watching --quick --json    shorter, to see that it works

All of it: fleetrun on a terminal, with --dashboard and a page that is open, --metrics_port and a scrape of every
process each second, --tensorboard, the record, and --trace_every where opentelemetry is installed (`traces` says
whether). Every worker reports its loss every tenth step. Measured in two ways, and a third beside them:

switched   one job under fleetrun, in which watching is switched off and on every two seconds: the same processes, the
           same memory, neighbouring windows in pairs. While it is off, fleetrun stands still and processes are in the
           state of those that nobody watches.
runs       whole jobs in turns: under fleetrun, and as roles that nobody watches, without a launcher. Both train the
           same number of steps, so that loss and AUC, on batches that nobody trained on, can be compared.
parts      the processor time of what watches, counted where it runs, as shares of all that the job used.

`cpu` is the processor time of a step, over all processes of the job, fleetrun included, watched / unwatched: what
watching costs where no core is free. `speed` is steps a second, the same way: what it costs where cores are free. Each
has the median of the pairs, and the ratio of the sums over all pairs, both with an interval of 95 % (bootstrap).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.timing import log, report
from benchmarks.watching_jobs import HAS_TRACES, Job, Look, unwatched, watched

_SETTLE = 0.2  # seconds after a switch that belong to no window
_RESAMPLED = 4000
Pair = tuple[Look, Look]  # watched, unwatched


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("servers", 2), ("workers", 4), ("batch", 512), ("num_ids", 200_000), ("trace_every", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of windows of the job that is switched, at most")
    parser.add_argument("--window", type=float, default=2.0, help="seconds")
    parser.add_argument("--runs", type=int, default=6, help="pairs of whole runs, at most")
    parser.add_argument("--steps", type=int, default=1500, help="of a worker in a whole run")
    parser.add_argument("--seconds", type=float, default=220.0, help="of all of it; the first 60 %% are for windows")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.num_ids, chosen.pairs, chosen.window, chosen.runs, chosen.steps = 20_000, 3, 1.0, 1, 100
    return chosen


def switched(chosen: argparse.Namespace, until: float) -> tuple[list[Pair], dict[str, float]]:
    """Windows of one job, in pairs, and the shares of what watches it. Which of a pair comes first changes."""
    pairs: list[Pair] = []
    with watched(chosen, 0) as job:
        job.wait_until("trains", 1)
        time.sleep(chosen.window)
        before = parts(job)
        while len(pairs) < chosen.pairs and not (pairs and time.monotonic() > until):
            number = len(pairs)
            found = {wanted: window(job, wanted, chosen.window) for wanted in _in_turns(number, (True, False))}
            pairs.append((found[True], found[False]))
            log(f"  pair {number + 1}/{chosen.pairs}: {in_words(pairs[-1])}")
        job.watch(True)
        used = {name: seconds - before[name] for name, seconds in parts(job).items()}
    used["fleetrun"] = sum(on.fleetrun_s for on, _ in pairs)
    whole = sum(on.processor_s for on, _ in pairs)
    return pairs, {name: seconds / whole for name, seconds in used.items()}


def window(job: Job, wanted: bool, seconds: float) -> Look:
    job.watch(wanted)
    time.sleep(_SETTLE)
    before = job.look()
    time.sleep(seconds)
    return job.look().since(before)


def parts(job: Job) -> dict[str, float]:
    """Processor time so far of what watches, in all servers and workers."""
    return {name: sum(job.board.of(f"{name}_s")) for name in ("statuses", "metrics_ports", "trace_export")}


def whole_runs(chosen: argparse.Namespace, until: float) -> tuple[list[Pair], dict[str, list[float]]]:
    """Whole jobs in turns while there is time; and the loss and AUC of each."""
    learned: dict[str, list[float]] = {}
    pairs: list[Pair] = []
    longest = 0.0
    while len(pairs) < chosen.runs and not (pairs and time.monotonic() + longest > until):
        begin, found = time.monotonic(), dict[str, Look]()
        for name in _in_turns(len(pairs), tuple(_RUNS)):
            with _RUNS[name](chosen, chosen.steps) as job:
                found[name] = whole_run(job, chosen.steps)
            for what in ("loss", "auc"):
                mean = statistics.fmean(job.board.of(what, chosen.servers))
                learned.setdefault(f"{name}_{what}", []).append(round(mean, 5))
        pairs.append((found["watched"], found["unwatched"]))
        longest = max(longest, time.monotonic() - begin)
        log(f"  run {len(pairs)}/{chosen.runs}: {in_words(pairs[-1])}")
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


def in_words(pair: Pair) -> str:
    return f"{cpu([pair]) - 1:+.2%} processor time, {speed([pair]) - 1:+.2%} speed"


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
    windows, shares = switched(chosen, begin + 0.6 * chosen.seconds)
    runs, learned = whole_runs(chosen, begin + chosen.seconds)
    rows = {"switched_cpu": (windows, cpu), "switched_speed": (windows, speed)}
    rows |= {"runs_cpu": (runs, cpu), "runs_speed": (runs, speed)}
    result: dict[str, Any] = {name: compared(pairs, ratio) for name, (pairs, ratio) in rows.items() if pairs}
    result["parts"] = {name: round(share, 6) for name, share in shares.items()}
    result |= learned
    off = [look for _, look in windows]
    steps = sum(look.steps for look in off)
    result["samples_per_s"] = chosen.batch * steps / sum(look.time for look in off)
    result["step_cpu_ms"] = 1000 * sum(look.processor_s for look in off) / steps
    result |= {"traces": HAS_TRACES, "servers": chosen.servers, "workers": chosen.workers}
    report({**result, "seconds": round(time.monotonic() - begin)}, chosen.json)


_RUNS = {"watched": watched, "unwatched": unwatched}


if __name__ == "__main__":
    main()
