"""A simulated month of hourly passes over drifting clicks, with rows dropped and without: AUC per hour, and memory.

python -m benchmarks.online --json --plot docs/plots/online.png     30 days x 24 passes, three times: about six minutes
python -m benchmarks.online --quick --json                          two days, to see that it works

Every pass is that of fleet.online.train_passes: evaluated before it is trained on, then trained, then saved (full at a
day's first hour, else a delta). (a) keeps every row for ever; (b) drops rows unseen for two days, every day; (c) also
gives a row only to ids seen twice. The three runs see the same samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from benchmarks.online_data import HOUR, NUM_SLOTS, START, Drift
from benchmarks.timing import log, report
from torchfleet.apps.online.parts import Part, day_and_hour

BATCH = 512
DIM = 8
DROPPED = fleet.Shrink(delete_after_unseen_days=2, every_hours=24, max_share=1.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "dropped": {"shrink": DROPPED},
    "counted": {"shrink": DROPPED, "entry": fleet.CountFilterEntry(2)},
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online", description=__doc__)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--samples", type=int, default=8_000, help="per hour")
    parser.add_argument("--plot", help="write a picture here")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.days, chosen.samples = 2, 1_000
    return chosen


class Month:
    """A source of generated hours; their samples are made where they are trained on."""

    def __init__(self, num_hours: int) -> None:
        self._num_hours = num_hours

    def next(self, position: Any) -> Part | None:
        number = int(position or 0)
        seconds = START + number * HOUR
        day, hour = day_and_hour(seconds)
        part = Part(f"{day}/{hour:02}", seconds, day, hour, number + 1)
        return part if number < self._num_hours else None

    def is_over(self, position: Any) -> bool:
        return int(position or 0) >= self._num_hours

    def files_of(self, part: Part, worker: int, num_workers: int) -> list[str]:
        return []

    def done(self, part: Part) -> None:
        """Nothing was made that has to go."""


class Clicks(torch.nn.Module):
    def __init__(self, policies: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = fleet.nn.SparseEmbedding(DIM, initializer=fleet.nn.Uniform(-0.05, 0.05), **policies)
        self.deep = torch.nn.Sequential(torch.nn.Linear(NUM_SLOTS * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.deep(self.embedding(ids).flatten(1))
        return out.squeeze(1)


def run(variant: str, days: int, samples: int) -> dict[str, Any]:
    """One run in this process: AUC, rows and bytes after each hour."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fleet.init()
    model = fleet.distributed_model(Clicks(VARIANTS[variant]))
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05))
    fleet.init_worker()
    drift = Drift(samples)
    hours: dict[str, list[float]] = {"auc": [], "rows": [], "bytes": []}

    def batches(part: Part) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ids, labels = (torch.from_numpy(array) for array in drift.hour(int(part.position) - 1))
        return list(zip(torch.split(ids, BATCH), torch.split(labels, BATCH), strict=True))

    def evaluate(part: Part, files: list[str]) -> fleet.metrics.AUC:
        meter = fleet.metrics.AUC()
        model.eval()
        with torch.no_grad():
            for ids, labels in fleet.prefetch(batches(part)):
                meter.update(model(ids), labels)
        model.train()
        return meter

    def train(part: Part, files: list[str]) -> None:
        for ids, labels in fleet.prefetch(batches(part)):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    def note(done: Any) -> None:
        table = fleet.stats()["servers"][0]["tables"]["embedding"]
        hours["auc"].append(done.auc)
        hours["rows"].append(table["rows"])
        hours["bytes"].append(table["bytes"] + table.get("admission_bytes", 0))

    with tempfile.TemporaryDirectory() as folder:
        fleet.online.train_passes(Month(24 * days), folder, train, evaluate=evaluate, on_pass=note)
    fleet.stop_worker()
    return hours


def in_process(variant: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """A job has one model: each run gets a process of its own."""
    command = [sys.executable, "-m", "benchmarks.online", "--variant", variant]
    command += ["--days", str(chosen.days), "--samples", str(chosen.samples)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    log(f"  {variant}: mean AUC {np.mean(found['auc'][24:]):.4f} from day 2 on, {found['rows'][-1]:,} rows at the end")
    return found


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    mean = {name: float(np.mean(hours["auc"][24:])) for name, hours in found.items()}
    result: dict[str, Any] = {"hours": len(found["all"]["auc"]), "samples": "the same for all"}
    for name, hours in found.items():
        result |= {f"auc_{name}": mean[name], f"rows_{name}": hours["rows"][-1], f"bytes_{name}": hours["bytes"][-1]}
    for name in ("dropped", "counted"):
        last_week = np.array(found[name]["auc"][-168:]) - np.array(found["all"]["auc"][-168:])
        result |= {
            f"auc_difference_{name}": mean[name] - mean["all"],
            f"auc_difference_{name}_last_week": float(last_week.mean()),
            f"rows_ratio_{name}": found[name]["rows"][-1] / found["all"]["rows"][-1],
            f"bytes_ratio_{name}": found[name]["bytes"][-1] / found["all"]["bytes"][-1],
        }
    return result


def draw(found: dict[str, dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = {"all": "every row kept", "dropped": "unseen for 2 days: dropped", "counted": "and a row at the 2nd sight"}
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    for name, hours in found.items():
        days = np.arange(len(hours["auc"])) / 24
        smooth = np.convolve(hours["auc"], np.ones(6) / 6, "same")
        above.plot(days[3:-3], smooth[3:-3], label=labels[name], linewidth=1)
        below.plot(days, np.array(hours["bytes"]) / 2**20, label=labels[name])
    above.set_ylabel("AUC of the next hour\n(mean of 6 hours)")
    below.set_ylabel("table, MiB")
    below.set_xlabel("day")
    above.legend(loc="lower right")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    chosen = options()
    if chosen.variant:
        print(json.dumps(run(chosen.variant, chosen.days, chosen.samples)))
        return
    log(f"{24 * chosen.days} hours of {chosen.samples:,} samples, {len(VARIANTS)} runs")
    found = {name: in_process(name, chosen) for name in VARIANTS}
    if chosen.plot:
        draw(found, chosen.plot)
    report(compared(found), chosen.json)


if __name__ == "__main__":
    main()
