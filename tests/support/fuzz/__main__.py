"""Searches all decoders in turns, and says how many executions were made and how many branches they took."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from support.fuzz.search import Search
from support.fuzz.targets import all_targets, fast_folder


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__)
    parser.add_argument("--executions", type=int, default=1_000_000, help="of all decoders together")
    parser.add_argument("--only", help="decoders whose names hold this text")
    parser.add_argument("--turn", type=float, default=5.0, help="seconds of one decoder before the next has its turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    started = time.process_time()
    with fast_folder() as folder:
        targets = [target for target in all_targets(Path(folder)) if not chosen.only or chosen.only in target.name]
        searches = {target.name: Search(target, chosen.seed) for target in targets}
        num = 0
        while num < chosen.executions:
            for search in searches.values():
                search.go_on(chosen.executions - num, chosen.turn)
            num = sum(search.found.executions for search in searches.values())
            print(f"  {num:,} executions, {time.process_time() - started:,.0f} s", file=sys.stderr, flush=True)
    found = {name: search.found for name, search in searches.items()}
    for name, one in found.items():
        taken = f"{one.taken:>4} of {one.branches:>4} branches"
        print(f"{name:20} {one.executions:>12,} executions  {taken}  {len(one.kept):>5} kept")
    faults = [(name, what, data) for name, one in found.items() for what, data in one.faults.items()]
    for name, what, data in faults:
        print(f"FAULT in {name}: {what}\n    {data[:400]!r}")
    total = {
        "executions": num,
        "branches_taken": sum(one.taken for one in found.values()),
        "branches": sum(one.branches for one in found.values()),
        "faults": len(faults),
        "cpu_seconds": round(time.process_time() - started, 1),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(total) if chosen.json else "\n".join(f"{name:20} {value:>12,}" for name, value in total.items()))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
