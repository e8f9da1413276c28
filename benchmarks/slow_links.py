"""Steps per second of two ranks joined by a slow link: plain data parallel beside the strategies for slow networks.

python -m benchmarks.slow_links --json                 about 20 minutes; needs root, for network namespaces of its own
python -m benchmarks.slow_links --rates 0 100          0: the same link without a limit, the roof
python -m benchmarks.slow_links --size small --json    a small model, one short round, to see that it works

The model is a stack of wide linear layers with a small batch: much to exchange (100 MB), little to compute. Every
figure is the median over rounds in which all take turns; `ratio` is to plain on the same link in the same run.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.links import Link, LinkError, link
from benchmarks.rank_jobs import run_ranks
from benchmarks.slow_links_worker import STRATEGIES
from benchmarks.timing import log, report

_WORKER = Path(__file__).with_name("slow_links_worker.py")
PADDLE = {("1000", "dgc"): 6.5}  # what Paddle's documents give for DGC at 1 Gb/s
_SIZES = {"full": (2048, 6), "small": (256, 6)}  # width and number of layers

Figures = dict[str, dict[str, float]]  # link, strategy


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rates", type=float, nargs="+", help="Mbit/s (default: 0 1000 100; 0: no limit)")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, help="(default: 3)")
    parser.add_argument("--seconds", type=float, help="about how long each measurement takes (default: 10)")
    parser.add_argument("--size", default="full", choices=list(_SIZES))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args(arguments)
    small = chosen.size == "small"
    chosen.rates = chosen.rates if chosen.rates is not None else [0, 20] if small else [0, 1000, 100]
    chosen.rounds = chosen.rounds if chosen.rounds is not None else 1 if small else 3
    chosen.seconds = chosen.seconds if chosen.seconds is not None else 0.5 if small else 10.0
    if min(chosen.rates) < 0 or chosen.rounds < 1 or chosen.seconds <= 0:
        parser.error("--rates must not be negative, --rounds and --seconds must be positive")
    if "plain" not in chosen.strategies:
        parser.error("--strategies must have 'plain': the others are measured against it")
    return chosen


def held(joined: Link, rate: float) -> float:
    """Set the rate, and see by a plain transfer that the link keeps to it."""
    joined.limit(rate)
    found = joined.measure()
    if rate and not 0.8 * rate <= found <= 1.1 * rate:
        raise LinkError(f"the link should be held at {rate:g} Mbit/s, but a plain transfer ran at {found:.1f}")
    return found


def trained(chosen: argparse.Namespace, joined: Link, strategy: str) -> dict[str, float]:
    width, layers = _SIZES[chosen.size]
    commands, extra = [], []
    for end, device in enumerate(joined.devices):
        what = ["train", "--strategy", strategy, "--seconds", str(chosen.seconds), "--device", device]
        size = ["--width", str(width), "--layers", str(layers)]
        commands.append(joined.inside(end, sys.executable, str(_WORKER), *what, *size))
        extra.append({"GLOO_SOCKET_IFNAME": device})
    slowest: dict[str, float] = min(
        run_ranks(commands, 600 + 20 * chosen.seconds, extra, joined.addresses[0]),
        key=lambda result: result["steps_per_s"],
    )
    return slowest


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[tuple[str, str], list[dict[str, float]]] = {}
    transfers: dict[str, list[float]] = {}
    with link() as joined:
        for turn in range(chosen.rounds):
            for rate in chosen.rates:
                name = f"{rate:g}"
                transfers.setdefault(name, []).append(held(joined, rate))
                for strategy in chosen.strategies:
                    found = trained(chosen, joined, strategy)
                    rounds.setdefault((name, strategy), []).append(found)
                    log(
                        f"  round {turn + 1}/{chosen.rounds}, {shown(name)} ({transfers[name][-1]:,.0f} measured): "
                        f"{strategy} {found['steps_per_s']:.3f} steps/s, {found['mb_per_step']:.4g} MB per step"
                    )
    figures: dict[str, Figures] = {}
    for key in ("steps_per_s", "mb_per_step"):
        for (name, strategy), found_all in rounds.items():
            middle = statistics.median(found[key] for found in found_all)
            figures.setdefault(key, {}).setdefault(name, {})[strategy] = middle
    figures["ratio"] = {
        name: {strategy: value / rates["plain"] for strategy, value in rates.items()}
        for name, rates in figures["steps_per_s"].items()
    }
    parameters = int(next(iter(rounds.values()))[0]["parameters"])
    return {
        **figures,
        "measured_mbit_per_s": {name: statistics.median(values) for name, values in transfers.items()},
        "parameters": parameters,
        "gradient_mb": parameters * 4 / 1e6,
    }


def shown(rate: str) -> str:
    return "no limit" if rate == "0" else f"{rate} Mbit/s"


def table(result: dict[str, Any]) -> str:
    lines = [f"{'link':>14}  {'strategy':<18} {'steps/s':>9} {'× plain':>8} {'MB sent/step':>13}  Paddle's"]
    for name, rates in result["steps_per_s"].items():
        for strategy, value in rates.items():
            ratio, sent = result["ratio"][name][strategy], result["mb_per_step"][name][strategy]
            paddle = f"{PADDLE[name, strategy]} ×" if (name, strategy) in PADDLE else ""
            lines.append(
                f"{shown(name):>14}  {strategy:<18} {value:>9.3f} {ratio:>8.2f} {sent:>13.4g}  {paddle}".rstrip()
            )
    return "\n".join(lines)


def main() -> None:
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, nothing is left behind
    try:
        result = measure(chosen)
    except LinkError as error:
        raise SystemExit(f"slow_links: {error}") from None
    print(table(result), flush=True)
    settings = {"rounds": chosen.rounds, "seconds": chosen.seconds, "size": chosen.size}
    if chosen.json:
        report({**result, "paddle_dgc_ratio_at_1000": PADDLE["1000", "dgc"], **settings}, as_json=True)


if __name__ == "__main__":
    main()
