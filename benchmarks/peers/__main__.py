"""torchfleet and its rivals in turns, on the same rows, seeds and model: speed, memory and quality.

python -m benchmarks.peers --json                                all rivals that are installed; some minutes each
python -m benchmarks.peers --quick --rivals torch,fbgemm         smaller and shorter, to see that it works
python -m benchmarks.peers --site paddle=DIR --site torchrec=DIR packages of a rival in a folder of their own, where
                                                                 `pip install --target DIR` has put them

A pair is a rival and torchfleet in the shape that does the same: as many processes, the same rule for rows. Each
process has one thread. `NAME_ratio` is the median over the rounds of our samples per second over theirs; a rival that
cannot run has the reason in its place. Memory is the sum of the most that each process had. Our processes find rows of
any 64-bit id, check gradients, and count what they do; rivals' ids are row numbers. docs/compare.md reads the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import statistics
import sys
from typing import Any

from benchmarks.peers.runs import Contender, Unable, run, summary
from benchmarks.timing import log, report

_ONE = ("--server_num", "1", "--worker_num", "1")
_TWO = ("--server_num", "1", "--worker_num", "2")
_RANKS = ("--nproc_per_node", "2")
PAIRS: dict[str, tuple[Contender, Contender, str]] = {  # rival, ours, what they do
    "torch": (
        Contender("torch_loader"),
        Contender("ours", ("--rule", "adam", "--mode", "local")),
        "one process; rows by SparseAdam",
    ),
    "ddp": (
        Contender("torch_ddp", ranks=2),
        Contender("ours", ("--rule", "adam", "--mode", "hybrid"), fleet=_TWO),
        "two ranks beside 1 server × 2 workers, hybrid; rows by SparseAdam",
    ),
    "fbgemm": (
        Contender("fbgemm"),
        Contender("ours", ("--rule", "row_wise", "--mode", "local")),
        "one process; rows by row-wise Adagrad",
    ),
    "torchrec": (
        Contender("torchrec_ranks", ranks=2),
        Contender("ours", ("--rule", "row_wise", "--mode", "hybrid"), fleet=_TWO),
        "two ranks beside 1 server × 2 workers, hybrid; rows by row-wise Adagrad",
    ),
    "paddle": (
        Contender("paddle_ps", has_server=True),
        Contender("ours", ("--rule", "adam", "--mode", "async"), fleet=_ONE),
        "1 server × 1 worker, async",
    ),
    "accelerate": (
        Contender("accelerate_ranks", ranks=2),
        Contender("ours", ("--rule", "adam", "--mode", "collective"), fleet=_RANKS),
        "two ranks, collective, dense gradients of all rows",
    ),
}
# What a rival was seen to work with; said where it does not work. docs/compare.md has the commands that install it.
SEEN = {
    "fbgemm": "fbgemm-gpu-cpu 1.8.0 with torch 2.13",
    "torchrec": "torchrec 1.8.0 and fbgemm-gpu-cpu 1.8.0 with torch 2.13; `pip install torchrec` asks for fbgemm-gpu, "
    "which has no package for aarch64, and goes back to torchrec 0.1.0",
    "paddle": "paddlepaddle 2.6.2",
}
ELSEWHERE = {
    "gensim": "word vectors: python -m benchmarks.word2vec --corpus text8.xz --json",
    "tensorflow": "its ParameterServerStrategy has no table that grows and no sparse rule of its own; not written",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"rows": 500_000, "batch": 1024, "dim": 16, "largest": 1_000_000, "seed": 0, "threads": 1, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rivals", default=",".join(PAIRS), help="some of them, by name (default: all)")
    parser.add_argument("--site", action="append", default=[], metavar="RIVAL=DIR", help="its packages are there")
    parser.add_argument("--quick", action="store_true", help="20,000 rows, one round")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    chosen.rivals, chosen.site = chosen.rivals.split(","), dict(one.split("=", 1) for one in chosen.site)
    unknown = [name for name in (*chosen.rivals, *chosen.site) if name not in PAIRS]
    if unknown:
        parser.error(f"expected rivals of {', '.join(PAIRS)}; found {', '.join(unknown)}")
    if chosen.quick:
        chosen.rows, chosen.largest, chosen.rounds = 20_000, 5_000, 1
    return chosen


def measured(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Figures of a pair, or why there are none."""
    rival, ours, _ = PAIRS[name]
    rival = dataclasses.replace(rival, site=chosen.site.get(name, ""))
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for turn in range(chosen.rounds):
        try:
            rounds.append((summary(run(rival, chosen)), summary(run(ours, chosen))))
        except Unable as error:
            reason = f"{error}. Works: {SEEN[name]}" if name in SEEN else str(error)
            log(f"  {name}: {reason}")
            return {f"{name}_ratio": f"not measured: {reason}"}
        theirs, mine = (one["samples_per_s"] for one in rounds[-1])
        log(f"  {name}, round {turn + 1}/{chosen.rounds}: {theirs:,.0f}, ours {mine:,.0f} samples/s")
    found = {
        f"{name}_ratio": statistics.median(mine["samples_per_s"] / theirs["samples_per_s"] for theirs, mine in rounds)
    }
    found[f"{name}_cpu_ratio"] = statistics.median(theirs["cpu_us"] / mine["cpu_us"] for theirs, mine in rounds)
    for place, side in enumerate((name, f"{name}_ours")):
        found |= {f"{side}_{key}": statistics.median(one[place][key] for one in rounds) for key in rounds[0][place]}
    return found


def table(found: dict[str, Any], names: list[str]) -> str:
    """One line for each contender."""
    lines = ["| | samples/s | µs of processor a sample | peak MB | AUC | ours / theirs |", "|---|---|---|---|---|---|"]
    for name in names:
        ratio = found[f"{name}_ratio"]
        if isinstance(ratio, str):
            lines.append(f"| {name} | {ratio} | | | | |")
            continue
        for side, title, last in (
            (name, f"{name}: {PAIRS[name][2]}", ""),
            (f"{name}_ours", "torchfleet", f"{ratio:.2f}"),
        ):
            speed, cpu, peak, area = (found[f"{side}_{key}"] for key in ("samples_per_s", "cpu_us", "peak_mb", "auc"))
            lines.append(f"| {title} | {speed:,.0f} | {cpu:.1f} | {peak:,.0f} | {area:.4f} | {last} |")
    return "\n".join(lines)


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    chosen = options()
    found: dict[str, Any] = {}
    for name in chosen.rivals:
        log(f"{name}: {PAIRS[name][2]}")
        found |= measured(name, chosen)
    print(table(found, chosen.rivals), file=sys.stderr if chosen.json else sys.stdout)
    settings = {key: getattr(chosen, key) for key in ("rows", "batch", "dim", "largest", "threads", "rounds")}
    report({**found, **settings, "elsewhere": ELSEWHERE, "torch": version_of("torch")}, chosen.json)


if __name__ == "__main__":
    main()
