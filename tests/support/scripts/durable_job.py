"""A job whose result says whether a change was lost or made twice. Started by fleetrun in the tests.

In async mode every step takes 1 from each of its rows: their sum counts the steps. In sync mode the digest of all
numbers is that of an undisturbed run, bit for bit. Prints both at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from gates import gate

import torchfleet as fleet

NUM_IDS, DIM, BATCH = 500, 4, 64


class Model(torch.nn.Module):
    def __init__(self, is_counting: bool) -> None:
        super().__init__()
        first = fleet.nn.Constant(0.0) if is_counting else None
        entry = None if is_counting else fleet.CountFilterEntry(2)
        self.rows = fleet.nn.SparseEmbedding(DIM, name="rows", initializer=first, entry=entry)
        self.linear = torch.nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.rows(ids)).squeeze(1)


def main() -> None:
    options = parse()
    is_counting = options.mode == "async"
    torch.manual_seed(0)
    fleet.init()
    model = fleet.distributed_model(Model(is_counting))
    make = torch.optim.SGD if is_counting else torch.optim.Adagrad
    strategy = fleet.DistributedStrategy(a_sync=is_counting)
    optimizer = fleet.distributed_optimizer(make(model.parameters(), lr=1.0 if is_counting else 0.1), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    dice = torch.Generator().manual_seed(fleet.worker_index())
    for step in range(options.steps):
        ids = torch.randperm(NUM_IDS, generator=dice)[:BATCH]
        if step < fleet.first_step():  # this worker was started again: its batch has been trained
            continue
        gate(options.gates, step)
        loss = model.rows(ids).sum() if is_counting else (model(ids) - ids % 2).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"worker {fleet.worker_index()} has made step {step}", flush=True)
        if options.save and step % options.save == 0 and fleet.worker_index() == 0:
            fleet.save_persistables(options.save_to)
        time.sleep(options.pause)
    fleet.flush()
    fleet.barrier_worker()
    if fleet.worker_index() == 0:
        with torch.no_grad():
            rows, others = model.rows(torch.arange(NUM_IDS)), model.linear.weight.detach()
        digest = hashlib.sha256(rows.numpy().tobytes() + others.numpy().tobytes()).hexdigest()
        print(f"steps counted: {-rows[:, 0].sum().item() / BATCH:g}\ndigest: {digest}", flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="sync", choices=["sync", "async"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after every step")
    parser.add_argument("--save", type=int, default=0, help="steps between two saves of worker 0")
    parser.add_argument("--save_to", default="")
    parser.add_argument("--gates", default="", help="the folder of files that hold the workers: see gates.py")
    return parser.parse_args()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
