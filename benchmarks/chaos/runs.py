"""Runs of one mode: under random faults, under kills without a pause, and beside undisturbed ones."""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chaos.faults import FAULTS, Event, is_whole, kill_primary
from benchmarks.chaos.fleets import Fleet, fleet
from benchmarks.chaos.job import BATCH
from benchmarks.timing import log
from torchfleet.ps.checkpoint.comparison import compare

_WARM = 50  # steps of each worker before anything is measured
Result = dict[str, Any]


class Meter:
    """Samples of all workers per second, from a moment on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._start, self._before = fleet, time.monotonic(), sum(fleet.board.num_steps())

    @property
    def samples(self) -> int:
        return BATCH * (sum(self._fleet.board.num_steps()) - self._before)

    @property
    def rate(self) -> float:
        return self.samples / (time.monotonic() - self._start)


class Disturbance:
    """The events of one run, and the lines about them."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self._fleet, self._dice = fleet, dice
        self.events: list[Event] = []
        self._gone: set[tuple[int, str]] = set()
        self._killed: dict[int, float] = {}  # when the primary of a shard was, until it is whole again
        self.filled: list[float] = []  # seconds until it was

    def random_fault(self) -> None:
        self._wait_for(range(self._fleet.chosen.servers))
        name = self._dice.choice(self._fleet.chosen.faults)
        self._note(FAULTS[name](self._fleet, self._dice))

    def kill_whole(self) -> None:
        """Kill the primary of a shard that is whole; others may be on their way to it."""
        shards = list(range(self._fleet.chosen.servers))
        self._dice.shuffle(shards)
        found: list[int] = []

        def look() -> bool:
            found[:] = self._whole(shards)
            return bool(found)

        self._fleet.wait(look, "shard that is whole")
        self._note(kill_primary(self._fleet, found[0]), found[0])

    def wait_until_whole(self) -> None:
        self._wait_for(range(self._fleet.chosen.servers))

    def _wait_for(self, shards: Sequence[int]) -> None:
        self._fleet.wait(lambda: len(self._whole(shards)) == len(shards), "whole fleet")

    def _whole(self, shards: Sequence[int]) -> list[int]:
        whole = [shard for shard in shards if is_whole(self._fleet, shard, self._gone)]
        for shard in set(whole) & set(self._killed):
            self.filled.append(time.monotonic() - self._killed.pop(shard))
        return whole

    def _note(self, event: Event, shard: int | None = None) -> None:
        self._gone |= event.gone
        if shard is not None:
            self._killed[shard] = event.begun
        self.events.append(event)
        clock = time.strftime("%H:%M:%S")
        log(f"{clock} {self._fleet.mode}: {event.what} of {event.who}: new steps after {event.silent:.2f} s")


def disturbed(chosen: argparse.Namespace, mode: str) -> Result:
    """Faults for a number of minutes, or a number of kills; in sync mode against the undisturbed run, bit for bit."""
    with _kept(mode) as kept:
        with fleet(chosen, mode) as running:
            disturbance = Disturbance(running, _dice(chosen, mode))
            running.wait_for_steps(_WARM)
            disturbance.wait_until_whole()
            before = _calm(running)
            meter = Meter(running)
            _disturb(
                chosen, disturbance, lambda: log(f"  {meter.rate:,.0f} samples/s, {meter.rate / before:.3f} of calm")
            )
            disturbance.wait_until_whole()
            shaken = meter.rate
            calm = [before, _calm(running)]
            result = {"goodput": shaken / statistics.fmean(calm), "samples_per_s": shaken, "calm_samples_per_s": calm}
            result = {**running.finish(), **result, **summary(disturbance)}
            if mode == "sync":
                shutil.copytree(running.folder / "model", kept / "disturbed")
                end = running.board.end
        if mode == "sync":
            log(f"sync: now {end:,} undisturbed steps")
            with fleet(chosen, mode, end) as running:
                running.finish()
                found = compare(str(kept / "disturbed"), str(running.folder / "model"))
            result["equals_the_undisturbed_run"] = found.is_equal
        return result


def _calm(running: Fleet) -> float:
    """Samples per second while nothing disturbs the run."""
    meter = Meter(running)
    time.sleep(running.chosen.calm)
    return meter.rate


def _tell_rate(disturbance: Disturbance, meter: Meter, before: float) -> None:
    """So that a run that is cut off has figures, too."""
    rate, num = meter.rate, len(disturbance.events)
    log(f"  {num} faults so far: {rate:,.0f} samples/s, {before:,.0f} in the calm before: {rate / before:.3f}")


def _disturb(chosen: argparse.Namespace, disturbance: Disturbance, tell: Callable[[], None]) -> None:
    """`tell` is called after each fault and the pause behind it."""
    end = time.monotonic() + 60 * chosen.minutes
    while (begun := time.monotonic()) < end and not 0 < chosen.kills <= len(disturbance.events):
        if chosen.kills:
            disturbance.kill_whole()
        else:
            disturbance.random_fault()
            disturbance.wait_until_whole()
        time.sleep(max(0.0, begun + chosen.every - time.monotonic()))
        tell()


def goodput(chosen: argparse.Namespace, mode: str) -> Result:
    """Undisturbed runs and runs with a kill of a primary every so often, in turns, of the same number of samples."""
    calm, shaken, kills = [], [], []
    for turn in range(chosen.rounds):
        calm.append(_timed(chosen, mode, 0, None))
        kills.append(_Kills())
        shaken.append(_timed(chosen, mode, calm[-1]["samples"], kills[-1]))
        pair = f"{calm[-1]['samples_per_s']:,.0f} undisturbed, {shaken[-1]['samples_per_s']:,.0f} with kills"
        log(f"{mode}: round {turn + 1}/{chosen.rounds}: samples/s {pair}")
    events = [event for each in kills for event in each.events]
    ratios = [b["samples_per_s"] / a["samples_per_s"] for a, b in zip(calm, shaken, strict=True)]
    return {
        **{name: sum(run[name] for run in shaken) for name in ("lost", "doubled", "steps", "unknown_steps")},
        "goodput": statistics.median(ratios),
        "auc": statistics.fmean(run["auc"] for run in shaken),
        "auc_undisturbed": statistics.fmean(run["auc"] for run in calm),
        "aucs": [run["auc"] for run in shaken],
        "aucs_undisturbed": [run["auc"] for run in calm],
        "samples_per_s": [run["samples_per_s"] for run in shaken],
        "samples_per_s_undisturbed": [run["samples_per_s"] for run in calm],
        **figures(events),
    }


class _Kills:
    """Kill a primary every so often, as long as a run goes on."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def run(self, running: Fleet, meter: Meter, samples: int) -> None:
        disturbance = Disturbance(running, _dice(running.chosen, running.mode))
        self.events = disturbance.events
        due = time.monotonic() + running.chosen.every
        while meter.samples < samples:
            if time.monotonic() >= due:
                due += running.chosen.every
                disturbance.kill_whole()
            time.sleep(0.01)


def _timed(chosen: argparse.Namespace, mode: str, samples: int, kills: _Kills | None) -> Result:
    """One run: for a number of minutes, or until as many samples were trained as in the run before."""
    with fleet(chosen, mode) as running:
        running.wait_for_steps(_WARM)
        meter = Meter(running)
        if kills is None:
            time.sleep(60 * chosen.minutes)
        else:
            kills.run(running, meter, samples)
        result = {"samples": meter.samples, "samples_per_s": meter.rate}
        return {**running.finish(), **result}


def summary(disturbance: Disturbance) -> Result:
    filled = disturbance.filled
    return {
        **figures(disturbance.events),
        "whole_after_s": round(statistics.median(filled), 2) if filled else None,
        "events": [{"what": e.what, "who": e.who, "silent_s": round(e.silent, 3)} for e in disturbance.events],
    }


def figures(events: Sequence[Event]) -> Result:
    """`takeover_*`: of killed primaries."""
    silent = [event.silent for event in events if event.is_primary_killed]
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        "kills": sum(event.what == "kill" for event in events),
        "primaries_killed": len(silent),
        **{f"takeover_{name}_s": _quantile(silent, q) for name, q in quantiles.items()},
    }


def _quantile(values: Sequence[float], q: float) -> float | None:
    return round(float(np.quantile(values, q)), 3) if values else None


def _dice(chosen: argparse.Namespace, mode: str) -> random.Random:
    return random.Random(f"{chosen.seed} {mode}")


@contextmanager
def _kept(mode: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"chaos-{mode}-kept-") as name:
        yield Path(name)
