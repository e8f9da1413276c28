"""How long async mode's queue should be: quality, speed and age of rows by send_queue_size, servers being the slower.

python -m benchmarks.queue_size --json                       sizes 1, 2, 4, 16; three seeds; 1 server, 2 workers
python -m benchmarks.queue_size --quick --json               tiny, to see that it works

Matrix factorisation of generated ratings with the shape of MovieLens-1M: 6,040 users, 3,706 items, few of them popular.
A worker computes next to nothing, so that its steps wait for the server, in the queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from benchmarks.timing import log, report

USERS, ITEMS, DIM, NOISE = 6040, 3706, 16, 0.85
BATCH = 256


class Factors(torch.nn.Module):
    """A rating is the product of a user's and an item's factors, and their biases."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean = mean
        self.user, self.item = (torch.nn.Embedding(rows, DIM, sparse=True) for rows in (USERS, ITEMS))
        self.user_bias, self.item_bias = (torch.nn.Embedding(rows, 1, sparse=True) for rows in (USERS, ITEMS))
        for embedding, std in ((self.user, 0.1), (self.item, 0.1), (self.user_bias, 0.0), (self.item_bias, 0.0)):
            torch.nn.init.normal_(embedding.weight, std=std)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        biases = self.user_bias(users) + self.item_bias(items)
        found: torch.Tensor = self.mean + biases.squeeze(1) + (self.user(users) * self.item(items)).sum(1)
        return found


def ratings(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users, items and their ratings; popular items are rated more often."""
    random = np.random.default_rng(0)
    users, items = (
        (rows * random.random(num) ** power).astype(np.int64) for rows, power in ((USERS, 1.5), (ITEMS, 2.5))
    )
    factors = [random.normal(0.0, 0.45, (rows, 4)) for rows in (USERS, ITEMS)]
    biases = [random.normal(0.0, 0.35, rows) for rows in (USERS, ITEMS)]
    true = 3.6 + biases[0][users] + biases[1][items] + (factors[0][users] * factors[1][items]).sum(1)
    noisy = np.clip(true + random.normal(0.0, NOISE, num), 1.0, 5.0)
    return torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(noisy.astype(np.float32))


def train(size: int, seed: int, num: int, epochs: int, rate: float) -> dict[str, Any]:
    """A worker's part: its share of the ratings in every epoch. Worker 0 has the result of all."""
    torch.manual_seed(seed)
    users, items, scores = ratings(num)
    cut = num * 9 // 10
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True, a_sync_configs={"send_queue_size": size}))
    model = fleet.distributed_model(Factors(float(scores[:cut].mean())))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=rate))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    index, workers = fleet.data_shard()
    fleet.barrier_worker()
    start = time.monotonic()
    for epoch in range(epochs):
        order = torch.randperm(cut, generator=torch.Generator().manual_seed(1000 * seed + epoch))[index::workers]
        for chosen in fleet.prefetch(_batches(users, items, scores, order)):
            loss = (model(chosen[0], chosen[1]) - chosen[2]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    fleet.barrier_worker()
    seconds, found = time.monotonic() - start, {}
    if fleet.is_first_worker():
        model.eval()
        with torch.no_grad():
            error = (model(users[cut:], items[cut:]) - scores[cut:]).square().mean().sqrt().item()
        ages = _ages(fleet.stats()["staleness_sparse"])
        found = {"rmse": error, "samples_per_s": epochs * cut / seconds, **ages}
    fleet.stop_worker()
    return found


def _batches(
    users: torch.Tensor, items: torch.Tensor, scores: torch.Tensor, order: torch.Tensor
) -> list[tuple[torch.Tensor, ...]]:
    return [(users[chosen], items[chosen], scores[chosen]) for chosen in torch.split(order, BATCH)]


def _ages(counts: dict[int, int]) -> dict[str, float]:
    ages = np.repeat(list(counts), list(counts.values()))
    return {"age_median": float(np.median(ages)), "age_largest": float(ages.max())}


def run(size: int, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One job of a server and two workers."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--size", str(size), "--seed", str(seed), "--ratings", str(chosen.ratings)]
        flags += ["--epochs", str(chosen.epochs), "--rate", str(chosen.rate)]
        command = [
            *(sys.executable, "-m", "torchfleet.launch", "--log_dir", folder, "--server_num", "1", "--worker_num", "2"),
            *("-m", "benchmarks.queue_size", "--work", *flags),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        lines = (Path(folder) / "latest" / "workerlog.0").read_text().splitlines()
    last = next((line for line in reversed(lines) if line.startswith("{")), None)
    if done.returncode or last is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(last)
    log(f"  queue of {size}, seed {seed}: {found}")
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queue_size",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ratings", type=int, default=300_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.01, help="Adam's")
    parser.add_argument("--quick", action="store_true", help="20,000 ratings, one epoch, one seed, sizes 2 and 16")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.ratings, chosen.epochs, chosen.seeds, chosen.sizes = 20_000, 1, 1, [2, 16]
    return chosen


def main() -> int:
    chosen = options()
    if chosen.work:
        print(json.dumps(train(chosen.size, chosen.seed, chosen.ratings, chosen.epochs, chosen.rate)), flush=True)
        return 0
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in chosen.sizes}
    for seed in range(chosen.seeds):  # sizes take turns
        for size in chosen.sizes:
            runs[size].append(run(size, seed, chosen))
    result: dict[str, Any] = {"ratings": chosen.ratings, "epochs": chosen.epochs, "rate": chosen.rate, "runs": runs}
    for size, found in runs.items():
        result[f"rmse_{size}"] = statistics.mean(one["rmse"] for one in found)
        result[f"samples_per_s_{size}"] = statistics.median(one["samples_per_s"] for one in found)
    report(result, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
