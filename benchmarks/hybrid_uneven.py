"""AUC of workers of which one is slow beside workers that are alike, at equal samples, in virtual time: every process
on a machine of its own, so that the slow worker is as slow as asked for."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.hybrid_runs import Found, auc, dropped_share, run, speed, trained
from benchmarks.timing import log

EVEN = "servers"
UNEVEN = ("balance", "quorum")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("uneven").add_argument
    add("--uneven_seeds", type=int, default=3)


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """By way, `servers` is that of workers that are alike: AUC of every seed, samples trained, samples/s."""
    found: dict[str, list[Found]] = {way: [] for way in (EVEN, *UNEVEN)}
    for seed in range(chosen.uneven_seeds):
        for way, runs in found.items():
            begun = time.monotonic()
            runs.append(run(way, chosen, chosen.workers, way != EVEN, is_simulated=True, seed=seed))
            what = f"{way}, seed {seed}: AUC {auc(runs[-1:]):.4f} of {trained(runs[-1:]):,.0f} samples"
            log(f"  {what}, {speed(runs[-1]):,.0f} samples/s, after {time.monotonic() - begun:.0f} s")
    return table(found, chosen.factor)


def table(found: dict[str, list[Found]], factor: float) -> dict[str, Any]:
    """`apart`: AUC less that of workers that are alike with the same seed, the mean. `ratio`: samples/s over the sum of
    the workers' speeds; of a quorum without the samples that were dropped."""
    even, num = found[EVEN], found[EVEN][0][0]["workers"]
    possible = (num - 1 + 1 / factor) / num  # of the speed of even workers
    result: dict[str, Any] = {}
    for way, runs in found.items():
        seeds = [auc([own]) for own in runs]
        result[way] = {"auc": [round(value, 4) for value in seeds], "trained": trained(runs)}
        if way == EVEN:
            continue
        kept = [1.0 - (dropped_share(own) if way == "quorum" else 0.0) for own in runs]
        ratios = [
            share * speed(own) / speed(same) / possible for own, same, share in zip(runs, even, kept, strict=True)
        ]
        result[way] |= {
            "apart": round(statistics.mean(value - auc([same]) for value, same in zip(seeds, even, strict=True)), 4),
            "ratio": round(statistics.median(ratios), 3),
        }
    return result
