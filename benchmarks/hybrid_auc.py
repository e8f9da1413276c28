"""AUC of CTR-DNN in hybrid and sync mode with some numbers of workers at the same global batch, over seeds, and over
rates of rows, the same ones for both."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scale_runs import RATE, Outcome, Setting, prepared, run
from benchmarks.timing import log

MODES = ("hybrid", "sync")
Found = list[tuple[Setting, Outcome]]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("AUC").add_argument
    add("--auc_workers", nargs="+", type=int, default=[8, 12, 32])
    add("--auc_real_up_to", type=int, default=12, help="largest number of workers as real processes; more: simulated")
    add("--auc_batch", type=int, default=1920, help="samples of a step of all workers together")
    add("--auc_rows", type=int, default=200_000, help="rows to make up (a tenth of them for testing)")
    add("--auc_data", metavar="FILE", help="a file of raw Criteo rows to train on instead")
    add("--auc_rates", nargs="+", type=float, default=[RATE], help="rates of rows to try, in both modes")
    add("--auc_epochs", type=int, default=3)
    add("--seeds", type=int, default=3)
    add("--auc_jobs", type=int, default=1, help="real runs at a time")
    add("--jobs", type=int, default=1, help="simulations at a time, beside real runs; each takes one core")


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """By mode and number of workers: test AUC, its means after each epoch, of each seed after the last, samples/s."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder) / "rows", chosen.auc_rows, chosen.auc_data)
        wanted = settings(chosen, data)
        real = [setting for setting in wanted if not setting.simulated]
        with ThreadPoolExecutor(chosen.auc_jobs) as real_ones, ThreadPoolExecutor(chosen.jobs) as others:
            under_way = [(each, (others if each.simulated else real_ones).submit(logged, each)) for each in wanted]
            found = [(setting, run.result()) for setting, run in under_way]
    log(f"  {len(real)} real runs, {len(wanted) - len(real)} simulated ones")
    return table(found) | ({"searched": searched(found)} if len(chosen.auc_rates) > 1 else {})


def settings(chosen: argparse.Namespace, data: str) -> list[Setting]:
    """All runs, seed by seed. Every worker's batch is its share of the global one."""
    return [
        Setting(
            data,
            mode,
            workers,
            seed,
            chosen.servers,
            chosen.auc_batch // workers,
            chosen.auc_epochs,
            workers > chosen.auc_real_up_to,
            row_rate=rate,
        )
        for seed in range(chosen.seeds)
        for workers in chosen.auc_workers
        for rate in chosen.auc_rates
        for mode in MODES
    ]


def logged(setting: Setting) -> Outcome:
    outcome = run(setting)
    epochs = ", ".join(f"{auc:.4f}" for auc in outcome.auc)
    log(f"  {setting.name}, rate {setting.row_rate:g}: AUC {epochs}, {outcome.samples_per_s:,.0f} samples/s")
    return outcome


def table(found: Found) -> dict[str, Any]:
    """By mode, workers and, if there are several, rate of rows."""
    has_rates = len({setting.row_rate for setting, _ in found}) > 1
    return {
        f"{name}{f'_rate_{rate:g}' if has_rates else ''}": {
            "mean": round(statistics.mean(outcome.auc[-1] for outcome in outcomes), 4),
            "seeds": [round(outcome.auc[-1], 4) for outcome in outcomes],
            "epochs": [round(mean, 4) for mean in by_epoch(outcomes)],
            "samples_per_s": statistics.median(outcome.samples_per_s for outcome in outcomes),
        }
        for name, rates in grouped(found).items()
        for rate, outcomes in rates.items()
    }


def searched(found: Found) -> dict[str, Any]:
    """By mode and workers: the rate of rows and the epoch with the best mean of the seeds, and AUC there. The same
    number of tries for both modes; tests and choice are on the same rows, so that both are a little too good."""
    return {name: _best(rates) for name, rates in grouped(found).items()}


def _best(rates: Mapping[float, list[Outcome]]) -> dict[str, Any]:
    tries = [(mean, rate, epoch) for rate, own in rates.items() for epoch, mean in enumerate(by_epoch(own))]
    mean, rate, epoch = max(tries)
    seeds = [round(outcome.auc[epoch], 4) for outcome in rates[rate]]
    return {"mean": round(mean, 4), "seeds": seeds, "rate": rate, "epoch": epoch + 1}


def grouped(found: Found) -> dict[str, dict[float, list[Outcome]]]:
    """By mode and workers, by rate of rows: the outcomes of all seeds."""
    made: dict[str, dict[float, list[Outcome]]] = {}
    for setting, outcome in found:
        name = f"{setting.mode}_{setting.workers}{'_simulated' if setting.simulated else ''}"
        made.setdefault(name, {}).setdefault(setting.row_rate, []).append(outcome)
    return made


def by_epoch(outcomes: Iterable[Outcome]) -> list[float]:
    """The mean AUC over seeds, after each epoch."""
    return [statistics.mean(of_epoch) for of_epoch in zip(*(outcome.auc for outcome in outcomes), strict=True)]
