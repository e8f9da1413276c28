"""Runs schedules of faults, then every planted bug until it is found; prints one line per bug."""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from support.faults.planted import BUGS
from support.faults.schedules import load_kernels
from support.faults.search import Found, failure, hunt

CHUNK = 20  # schedules that a process of the pool runs at a time
SLOW = 120.0  # seconds of one schedule after which its threads are printed: most take a third of a second


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m support.faults", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--fleet", help="only schedules of these servers: plain, logged or replicas")
    parser.add_argument(
        "--bug_schedules", type=int, default=300, help="schedules after which a planted bug is not found"
    )
    parser.add_argument("--only", default="", help="bugs whose names hold this text")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def run_some(fleet: str | None, seeds: range) -> tuple[list[tuple[int, str]], float, Counter[str]]:
    """What went wrong by seed, the seconds of the processor that it took, and how many schedules of which kind."""
    started, kinds = time.process_time(), Counter[str]()
    failed = []
    for seed in seeds:
        faulthandler.dump_traceback_later(SLOW)
        kind, error = failure(seed, fleet)
        kinds[kind] += 1
        if error is not None:
            failed.append((seed, f"{kind}: {type(error).__name__}: {error}"))
            print(f"FAILED seed {seed}: {failed[-1][1][:300]}", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    return failed, time.process_time() - started, kinds


def run_schedules(pool: ProcessPoolExecutor, chosen: argparse.Namespace) -> tuple[int, float]:
    """How many failed, and the seconds of the processor for all."""
    starts = range(chosen.seed, chosen.seed + chosen.schedules, CHUNK)
    chunks = [range(start, min(start + CHUNK, chosen.seed + chosen.schedules)) for start in starts]
    failed: list[tuple[int, str]] = []
    seconds, kinds = 0.0, Counter[str]()
    for some, cpu, counted in pool.map(run_some, [chosen.fleet] * len(chunks), chunks):
        failed, seconds, kinds = failed + some, seconds + cpu, kinds + counted
        print(f"  {kinds.total():,} schedules, {len(failed)} failed, {seconds:,.0f} s", file=sys.stderr, flush=True)
    for kind, num in sorted(kinds.items()):
        print(f"{kind:24} {num:>7,} schedules")
    for seed, text in failed:
        print(f"FAILED seed {seed}: {text[:300]}")
    return len(failed), seconds


def find_bugs(pool: ProcessPoolExecutor, chosen: argparse.Namespace) -> list[Found | None]:
    names = [name for name in BUGS if chosen.only in name]
    hunts = {pool.submit(hunt, name, chosen.bug_schedules): name for name in names}
    results: list[Found | None] = []
    for done in as_completed(hunts):
        error = done.exception()
        found = done.result() if error is None else None
        text = f"found      after {found.num_schedules:>3}: {found.text[:90]}" if found else "NOT FOUND"
        print(f"{hunts[done]:86} {text if error is None else f'CANNOT BE PLANTED: {error}'}", flush=True)
        results.append(found)
    return results


def main() -> int:
    chosen = options()
    load_kernels()  # the processes of the pool are forked from this one
    with ProcessPoolExecutor(chosen.processes) as pool:
        num_failed, seconds = run_schedules(pool, chosen)
        found = find_bugs(pool, chosen)
    total = {
        "schedules": chosen.schedules,
        "failed": num_failed,
        "cpu_seconds": round(seconds, 1),
        "schedules_per_cpu_hour": round(chosen.schedules * 3600 / seconds) if seconds else 0,
        "bugs": len(found),
        "bugs_found": sum(one is not None for one in found),
    }
    print(json.dumps(total) if chosen.json else "\n".join(f"{name:24} {value:>10,}" for name, value in total.items()))
    return 1 if num_failed or total["bugs_found"] < 0.95 * total["bugs"] else 0


if __name__ == "__main__":
    sys.exit(main())
