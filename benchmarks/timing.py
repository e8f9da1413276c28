"""What all benchmarks share: progress on stderr, one JSON object as the last line of stdout."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def log(text: str) -> None:
    """A line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def in_turns(rounds: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each contender measured in `rounds`, taken in turns (A B A B ...), so that drift hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, measure in contenders.items():
            found[name].append(measure())
        log(f"  round {turn + 1}/{rounds}: " + ", ".join(f"{name} {values[-1]:,.0f}" for name, values in found.items()))
    return found


def interleave(rounds: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Median of each contender over `rounds`, taken in turns."""
    return {name: statistics.median(values) for name, values in in_turns(rounds, contenders).items()}


def rate(num: int, work: Callable[[], None]) -> float:
    """`num`, the items that `work` handles, per second."""
    start = time.perf_counter()
    work()
    return num / (time.perf_counter() - start)


def report(result: dict[str, Any], as_json: bool) -> None:
    """Print the result and the machine: as one JSON object, or a line for each number."""
    result = {**result, "machine": f"{platform.machine()}, Python {platform.python_version()}"}
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28} {value:,.4g}" if isinstance(value, float) else f"{name:28} {value}")
