"""Small models of many small tables: samples per second of processor time, beside plain torch at the same batch.

python -m benchmarks.deepfm_cpu --json            deepctr-torch's DeepFM and DCN with 15 categories, examples/deepfm
python -m benchmarks.deepfm_cpu --quick --json    shorter, to see that it works

Plain torch has one thread, and the cheaper of dense and sparse gradients. A fleet's figure is the processor time of a
worker, all its threads; in one process that of worker and server together. `deepfm_cpu_ratio` is the smallest ratio of
deepctr-torch's DeepFM over the modes and batches; `cpu_ratio` has all of them, and `auc` what each has learned: a fleet
of two workers has made as many steps as plain torch, each with twice the samples.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.deepfm import run
from benchmarks.deepfm_worker import MODELS
from benchmarks.timing import log, report

SETTINGS = {
    "one process": (["--mode", "sync"], 0),
    "sync": (["--mode", "sync"], 2),
    "async": (["--mode", "async"], 2),
    "hybrid": (["--mode", "hybrid"], 2),
}
_PLAIN = {kind: (["--plain", kind, "--threads", "1"], 0) for kind in ("dense", "sparse")}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deepfm_cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 256, 512], help="samples of a process's step")
    parser.add_argument("--slots", type=int, default=15, help="categories of deepctr-torch's models")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=1000, help="ids of the largest category")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.batches, chosen.steps, chosen.rounds = [128], 20, 1
    return chosen


def measured(chosen: argparse.Namespace, model: str, batch: int) -> tuple[dict[str, float], dict[str, float]]:
    """By setting: milliseconds of processor time of a step, and AUC: medians over processes and rounds."""
    words = ["--model", model, "--slots", str(chosen.slots)]
    times: dict[str, list[float]] = {name: [] for name in (*_PLAIN, *SETTINGS)}
    aucs: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(chosen.rounds):
        for name, (contender, workers) in {**_PLAIN, **SETTINGS}.items():
            sized = argparse.Namespace(
                rows=batch * chosen.steps * max(1, workers), batch=batch, dim=8, largest=chosen.largest, seed=0
            )
            found = run(sized, [*words, *contender], workers)
            times[name] += [worker["cpu_ms"] for worker in found]
            aucs[name].append(found[0]["auc"])
    return _medians(times), _medians(aucs)


def _medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(numbers) for name, numbers in found.items()}


def ratios(step_ms: dict[str, float]) -> dict[str, float]:
    """By setting: samples per second of processor time, over those of plain torch at its best."""
    best = min(step_ms[name] for name in _PLAIN)
    return {name: best / step_ms[name] for name in SETTINGS}


def main() -> None:
    chosen = options()
    found: dict[str, dict[str, Any]] = {}
    for model in chosen.models:
        for batch in chosen.batches:
            step_ms, auc = measured(chosen, model, batch)
            beside, best = ratios(step_ms), min(step_ms[name] for name in _PLAIN)
            found[f"{model} {batch}"] = {"step_ms": step_ms, "cpu_ratio": beside, "auc": auc}
            log(f"{model}, batch {batch}: CPU ms of a step, beside plain torch at its best, AUC")
            for name, value in step_ms.items():
                log(f"  {name:12} {value:8.2f} {best / value:6.2f} {auc[name]:8.4f}")
    of_deepfm = [min(told["cpu_ratio"].values()) for name, told in found.items() if name.startswith("deepfm")]
    report(
        {
            "deepfm_cpu_ratio": min(of_deepfm, default=None),
            "cpu_ratio": {name: told["cpu_ratio"] for name, told in found.items()},
            "step_ms": {name: told["step_ms"] for name, told in found.items()},
            "auc": {name: told["auc"] for name, told in found.items()},
            **{name: getattr(chosen, name) for name in ("slots", "steps", "rounds", "largest")},
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
