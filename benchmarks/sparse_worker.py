"""One role of benchmarks.sparse: a model that is nearly all embedding, trained for a while and timed."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

import torchfleet as fleet

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "rowwise_adagrad": lambda parameters: fleet.optim.RowWiseAdagrad(parameters, lr=0.01),
}


class SummedIds(torch.nn.Module):
    """26 ids of dim 16, summed, then one linear layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(dim, name="rows", initializer=fleet.nn.Uniform(-0.01, 0.01))
        self.out = torch.nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.rows(ids, offsets)).squeeze(1)
        return logits


def batches(options: argparse.Namespace, worker: int, num_workers: int) -> list[Batch]:
    """This worker's share of the batches, which are the same ones however many workers there are."""
    cumulative = np.cumsum(1.0 / np.arange(1, options.num_ids + 1) ** options.zipf)
    names = np.random.default_rng(0).permutation(options.num_ids)  # the same hot ids on all workers
    offsets = torch.arange(0, options.batch * options.slots, options.slots)
    made = []
    for number in range(worker, max(options.num_batches, num_workers), num_workers):
        rng = np.random.default_rng(1 + number)
        ranks = np.searchsorted(cumulative, rng.random(options.batch * options.slots) * cumulative[-1])
        label = torch.from_numpy(labels(names, ranks.reshape(options.batch, -1), rng))
        made.append((torch.from_numpy(names[ranks]), offsets, label))
    return made


def labels(names: np.ndarray, ranks_BS: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """0 or 1, by chance and by what is hidden in the ids: a weight for each, drawn from its name."""
    weights = np.sin(names[ranks_BS] * 0.7)
    found: np.ndarray = (weights.mean(axis=1) * 4 + rng.normal(0, 0.5, len(ranks_BS)) > 0).astype(np.float32)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 4096), ("slots", 26), ("dim", 16), ("num_ids", 10_000_000), ("num_batches", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--mode", default="async")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--report_every", type=int, default=0, help="give the loss to fleet.report every N steps")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    fleet.init()
    model = fleet.distributed_model(SummedIds(options.dim))
    strategy = fleet.DistributedStrategy(a_sync=options.mode == "async")
    optimizer = fleet.distributed_optimizer(OPTIMIZERS[options.optimizer](model.parameters()), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    data = batches(options, fleet.worker_index(), fleet.worker_num())
    fleet.init_worker()

    losses: deque[torch.Tensor] = deque(maxlen=len(data))  # of the last pass

    def train(loader: Iterable[Batch], until: float) -> int:
        steps = 0
        for ids, offsets, label in fleet.prefetch(loader):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, offsets), label)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            steps += 1
            if options.report_every and steps % options.report_every == 0:
                fleet.report(loss=float(loss))
            if time.perf_counter() > until:
                break
        return steps

    train(islice(cycle(data), len(data)), float("inf"))  # every row exists, everything is compiled
    fleet.barrier_worker()
    before = fleet.stats()["worker"]
    start, cpu = time.perf_counter(), time.process_time()
    steps = train(cycle(data), start + options.seconds)
    fleet.flush()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    stats = fleet.stats()
    after = stats["worker"]
    busy = [server["busy"] for server in stats["servers"] if server["busy"] is not None]
    waited = {
        name: (after[name] * after["steps"] - before[name] * before["steps"]) / steps
        for name in ("pull_wait_ms", "push_wait_ms", "dense_wait_ms")
    }
    unique = float(np.mean([len(np.unique(ids.numpy())) for ids, _, _ in data[:8]]))
    speed = {"samples_per_s": steps * options.batch / seconds, "step_ms": 1000 * seconds / steps}
    speed["cpu_ms"] = 1000 * cpu / steps
    loss = float(torch.stack(list(losses)).mean())
    result = {**speed, **waited, "unique": unique, "loss": loss}
    if busy:
        result["servers_busy"] = float(np.mean(busy))
    print("RESULT " + json.dumps(result), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
