"""One role of benchmarks.sparse: a model that is nearly all embedding, trained for a while and timed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from itertools import cycle, islice

import numpy as np
import torch

import torchfleet as fleet

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SummedIds(torch.nn.Module):
    """26 ids of dim 16, summed, then one linear layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(dim, name="rows", initializer=fleet.nn.Uniform(-0.01, 0.01))
        self.out = torch.nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.rows(ids, offsets)).squeeze(1)
        return logits


def batches(options: argparse.Namespace, seed: int) -> list[Batch]:
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(1.0 / np.arange(1, options.num_ids + 1) ** options.zipf)
    names = np.random.default_rng(0).permutation(options.num_ids)  # the same hot ids on all workers
    offsets = torch.arange(0, options.batch * options.slots, options.slots)
    made = []
    for _ in range(options.num_batches):
        ranks = np.searchsorted(cumulative, rng.random(options.batch * options.slots) * cumulative[-1])
        label = torch.from_numpy(rng.integers(0, 2, options.batch).astype(np.float32))
        made.append((torch.from_numpy(names[ranks]), offsets, label))
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 4096), ("slots", 26), ("dim", 16), ("num_ids", 10_000_000), ("num_batches", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--mode", default="async")
    options = parser.parse_args()
    torch.manual_seed(0)
    fleet.init()
    model = fleet.distributed_model(SummedIds(options.dim))
    strategy = fleet.DistributedStrategy(a_sync=options.mode == "async")
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    data = batches(options, 1 + fleet.worker_index())
    fleet.init_worker()

    def train(loader: Iterable[Batch], until: float) -> int:
        steps = 0
        for ids, offsets, label in fleet.prefetch(loader):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, offsets), label)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if time.perf_counter() > until:
                break
        return steps

    train(islice(cycle(data), len(data)), float("inf"))  # every row exists, everything is compiled
    fleet.barrier_worker()
    before = fleet.stats()["worker"]
    start = time.perf_counter()
    steps = train(cycle(data), start + options.seconds)
    fleet.flush()
    seconds = time.perf_counter() - start
    after = fleet.stats()["worker"]
    waited = {
        name: (after[name] * after["steps"] - before[name] * before["steps"]) / steps
        for name in ("pull_wait_ms", "push_wait_ms")
    }
    unique = float(np.mean([len(np.unique(ids.numpy())) for ids, _, _ in data[:8]]))
    speed = {"samples_per_s": steps * options.batch / seconds, "step_ms": 1000 * seconds / steps}
    result = {**speed, **waited, "unique": unique}
    print("RESULT " + json.dumps(result), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
