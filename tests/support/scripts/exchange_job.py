"""A hybrid job that tests start: the gradient of one of its parameters is a constant, so that its value counts rounds.

Every worker prints, after each step: the round, the value, and the seconds since the step before.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from gates import gate

import torchfleet as fleet
from torchfleet.api import current_job

NUM_MARKS = 8192  # several servers have a part of them


class Model(torch.nn.Module):
    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.items = fleet.nn.SparseEmbedding(2, name="items")
        self.tower = torch.nn.Linear(2, 1)
        self.marks = torch.nn.Parameter(torch.zeros(NUM_MARKS))
        self._gradient = gradient

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.items(ids)).squeeze(1) + self._gradient * self.marks.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a step")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that the last worker computes longer")
    parser.add_argument("--gradient", type=float, default=1.0)
    parser.add_argument("--by_worker", action="store_true", help="the gradient of worker i is i + 1 times as large")
    parser.add_argument("--gates", default="", help="the folder of files that hold the workers: see gates.py")
    options = parser.parse_args()
    torch.manual_seed(0)
    fleet.init()
    scale = fleet.worker_index() + 1 if options.by_worker and fleet.is_worker() else 1
    model = fleet.distributed_model(Model(options.gradient * scale))
    strategy = fleet.DistributedStrategy(
        a_sync=True, a_sync_configs={"hybrid": True, **options.configs}, sync_timeout=60.0
    )
    groups = [
        {"params": [model.marks], "lr": 1.0},
        {"params": [*model.tower.parameters(), *model.items.parameters()], "lr": 0.01},
    ]
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(groups), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    ids = torch.arange(8).view(4, 2)
    before = time.monotonic()
    for step, _ in enumerate(fleet.prefetch([ids] * options.steps)):
        gate(options.gates, step)
        loss = model(ids[:, 0]).mean()
        if fleet.worker_index() == fleet.worker_num() - 1:
            time.sleep(options.slow)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        rounds = getattr(current_job.get_worker()._hybrid, "rounds", None)
        number = rounds.number if rounds is not None else 0
        values = model.marks.detach().unique().tolist()
        if rounds is not None and rounds.is_missed:
            print("missed", flush=True)
            continue
        if hasattr(rounds, "parts"):
            print(f"parts of {number}: {json.dumps(rounds.parts)}", flush=True)
        print(f"round {number} values {json.dumps(values)} seconds {now - before:.3f}", flush=True)
        before = now
        time.sleep(options.pause)
    fleet.barrier_worker()
    fleet.stop_worker()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
