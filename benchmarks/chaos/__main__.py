"""Faults under training, on real processes that fleetrun starts: what is lost, what is doubled, how long it takes.

python -m benchmarks.chaos --json                              ten minutes of random faults in each mode, with backups
python -m benchmarks.chaos --durability log --json             the same with logs on disk
python -m benchmarks.chaos --durability log --replicas 2       with both
python -m benchmarks.chaos --modes async --faults kill,stop5 --minutes 2 --every 10
python -m benchmarks.chaos --kills 200 --at_once --json        primaries killed as soon as they have a backup again
python -m benchmarks.chaos --modes hybrid --kills 16 --every 60 --calm 120 --json       a primary every minute
python -m benchmarks.chaos --goodput --minutes 5 --every 60 --json      beside the undisturbed run, in turns

Every step takes 1 from rows of its own, beside a model of clicks: a row that was not touched is a step that was lost,
one that was touched twice a step that was doubled. In sync mode the saved model must equal that of an undisturbed
run, bit for bit. `takeover_p99_s`: of killed primaries, the longest time between two steps of a worker, from the
kill until all train again. `goodput`: samples per second under faults, over the mean of those in the calm stretches of
--calm seconds before and after, or with --goodput over those of undisturbed runs. For `link` and `oneway` every server
is on a machine of its own: a network namespace, which needs root, and etcd for backups. Exit status: 1 if anything was
lost, doubled or not as it must be; 2 if a fault that was asked for cannot be tried here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import FAULTS, ON_LINKS
from benchmarks.chaos.fleets import ChaosError
from benchmarks.chaos.job import MODES
from benchmarks.chaos.machines import machines
from benchmarks.chaos.runs import Result, disturbed, goodput
from benchmarks.chaos.small_disk import DiskError, small_disk
from benchmarks.links import LinkError
from benchmarks.timing import log, report

_STEPS_PER_SAVE = 2000  # of worker 0, where servers have logs: a full save begins a new segment


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {','.join(MODES)}")
    parser.add_argument("--durability", choices=["log"], help="servers have logs, and are started again from them")
    parser.add_argument("--replicas", type=int, choices=[2], help="servers have backups (default without --durability)")
    parser.add_argument("--faults", help=f"some of {','.join(FAULTS)} (default: all that can be tried here)")
    parser.add_argument(
        "--minutes", type=float, help="of faults, or of an undisturbed run (10); with --kills: at most this long"
    )
    parser.add_argument("--every", type=float, help="seconds from one fault to the next (30; with --kills: no pause)")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds before the first fault, and after the last")
    parser.add_argument("--kills", type=int, default=0, help="number of primaries to kill, each when it has a backup")
    parser.add_argument("--goodput", action="store_true", help="measure speed beside undisturbed runs")
    parser.add_argument("--rounds", type=int, default=1, help="of --goodput")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at_once", action="store_true", help="all modes at the same time, a process for each")
    parser.add_argument("--logs", metavar="DIR", help="keep the logs of all processes below it")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args(arguments)
    chosen.minutes = chosen.minutes or (math.inf if chosen.kills else 10.0)
    chosen.every = chosen.every if chosen.every is not None else 0.0 if chosen.kills else 30.0
    chosen.modes = _listed(parser, "--modes", chosen.modes, MODES)
    chosen.replicas = chosen.replicas or (1 if chosen.durability else 2)
    chosen.save_every = _STEPS_PER_SAVE if chosen.durability else 0
    if chosen.kills and chosen.goodput:
        parser.error("--kills measures beside calm stretches, --goodput beside undisturbed runs: use one of them")
    _choose_faults(parser, chosen)
    return chosen


def _choose_faults(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Those that were asked for, or all that can be tried here."""
    is_kill_only = chosen.kills or chosen.goodput
    if is_kill_only and chosen.faults:
        parser.error("--kills and --goodput kill primaries: leave --faults out")
    asked = ["kill"] if is_kill_only else _listed(parser, "--faults", chosen.faults or ",".join(FAULTS), FAULTS)
    possible = []
    for fault in asked:
        why = _obstacle(fault, chosen)
        if why and chosen.faults:
            parser.error(f"--faults {fault}: {why}")
        if why:
            log(f"not tried: {fault}: {why}")
        else:
            possible.append(fault)
    chosen.faults = possible
    chosen.has_links, chosen.has_disk = bool(set(possible) & set(ON_LINKS)), "disk" in possible


def _obstacle(fault: str, chosen: argparse.Namespace) -> str:
    """Why it cannot be tried; "" if it can."""
    if fault == "disk" and not chosen.durability:
        return "only servers with --durability log write to a disk"
    if fault in ON_LINKS and chosen.replicas == 2 and chosen.servers < 2:
        return "a backup is on the next machine of a server: --servers 2"
    try:
        if fault in ON_LINKS:
            with machines(1) as network:
                network.mute(0)
        elif fault == "disk":
            with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "disk") as disk:
                disk.fill()
    except (LinkError, DiskError) as error:
        return str(error)
    return ""


def _listed(parser: argparse.ArgumentParser, option: str, text: str, known: Any) -> list[str]:
    names = [name for name in text.split(",") if name]
    strange = [name for name in names if name not in known]
    if strange or not names:
        parser.error(f"{option}: expected some of {', '.join(known)}; found {', '.join(strange) or 'none'}")
    return names


def measured(chosen: argparse.Namespace) -> dict[str, Result]:
    """By mode."""
    return {mode: goodput(chosen, mode) if chosen.goodput else disturbed(chosen, mode) for mode in chosen.modes}


def at_once(chosen: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Result]:
    """The same, each mode in a process of its own."""
    rest = [argument for argument in arguments if argument not in ("--at_once", "--json")]
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for mode in chosen.modes:
            command = [sys.executable, "-m", "benchmarks.chaos", *rest, "--modes", mode, "--json"]
            processes[mode] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        found = {}
        for mode, process in processes.items():
            lines = process.communicate()[0].splitlines()
            if not lines or not lines[-1].startswith("{"):
                raise ChaosError(f"{mode}: ended with {process.returncode}, and without a result")
            found[mode] = json.loads(lines[-1])["by_mode"][mode]
        return found
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()  # it cleans up
                process.wait(60)


def combined(found: dict[str, Result]) -> Result:
    """Over all modes: the sums, and the worst."""
    takeovers = [result["takeover_p99_s"] for result in found.values() if result["takeover_p99_s"] is not None]
    equal = [
        result["equals_the_undisturbed_run"] for result in found.values() if "equals_the_undisturbed_run" in result
    ]
    return {
        **{name: sum(result[name] for result in found.values()) for name in ("lost", "doubled", "kills")},
        "takeover_p99_s": max(takeovers, default=None),
        "goodput": min(result["goodput"] for result in found.values()),
        "sync_equals_the_undisturbed_run": all(equal) if equal else None,
    }


def table(found: dict[str, Result]) -> str:
    lines = [f"{'mode':<11}{'kills':>6}{'lost':>6}{'doubled':>8}{'p50':>8}{'p99':>8}{'longest':>9}{'goodput':>9}"
             f"{'AUC':>8}{'steps':>10}"]  # fmt: skip
    for mode, result in found.items():
        times = "".join(f"{'-' if (v := result[f'takeover_{n}_s']) is None else format(v, '.2f'):>{w}}"
                        for n, w in (("p50", 8), ("p99", 8), ("max", 9)))  # fmt: skip
        lines.append(
            f"{mode:<11}{result['kills']:>6}{result['lost']:>6}{result['doubled']:>8}{times}{result['goodput']:>9.3f}"
            f"{result['auc']:>8.4f}{result['steps']:>10,}"
        )
    by_kind: dict[str, list[float]] = {}
    for result in found.values():
        for event in result.get("events", []):
            by_kind.setdefault(f"{event['what']}, {event['who'].split()[0]}", []).append(event["silent_s"])
    lines += [f"{kind:<32}{len(times):>4} times, workers wait {sorted(times)[len(times) // 2]:.2f} s, at most "
              f"{max(times):.2f} s" for kind, times in sorted(by_kind.items())]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    chosen = options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, nothing is left behind
    try:
        found = at_once(chosen, arguments) if chosen.at_once else measured(chosen)
    except (ChaosError, LinkError, DiskError) as error:
        log(f"chaos: {error}")
        return 1
    all_of_it = combined(found)
    log(table(found))
    settings = {name: getattr(chosen, name) for name in ("replicas", "faults", "every", "servers", "workers", "seed")}
    details = {"by_mode": found} if chosen.json else {}
    report({**all_of_it, **settings, "cores": os.cpu_count(), **details}, chosen.json)
    is_unequal = all_of_it["sync_equals_the_undisturbed_run"] is False
    return 1 if all_of_it["lost"] or all_of_it["doubled"] or is_unequal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
