"""A job whose network is computed by heter workers, if there are any. Started by fleetrun in the tests.

Without fleetrun it is the same training in one process; `combined` then trains on the batches of all workers at once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from support.scripts.gates import gate

import torchfleet as fleet

NUM_IDS, DIM, BATCH = 40, 4, 16
CONFIGS: dict[str, dict[str, int | bool]] = {
    "sync": {},
    "half_async": {"half_async": True},
    "async": {},
    "geo": {"k_steps": 1},
    "hybrid": {"hybrid": True},
}


class Model(torch.nn.Module):
    def __init__(self, is_guarded: bool = True) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM, name="rows")
        self.scale = torch.nn.Linear(DIM, DIM)
        with fleet.device_guard("gpu" if is_guarded else "cpu"):
            self.tower = torch.nn.Sequential(torch.nn.Linear(DIM, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.scale(self.rows(ids))).squeeze(1)


def batch(worker: int, step: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randint(NUM_IDS, (BATCH,), generator=dice)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - ids % 2).square().mean()


def train(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """What worker 0 has at the end."""
    torch.manual_seed(0)
    fleet.init()
    model = fleet.distributed_model(Model(not options.unguarded))
    strategy = fleet.DistributedStrategy(a_sync=options.mode != "sync", a_sync_configs=CONFIGS[options.mode])
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        raise SystemExit(0)
    fleet.init_worker()
    workers = range(options.combined) if options.combined else [fleet.worker_index()]
    for step in range(options.steps):
        gate(options.gates, step)
        loss = torch.stack([loss_of(model, batch(worker, step)) for worker in workers]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"worker {fleet.worker_index()} has made step {step}", flush=True)
        time.sleep(options.pause)
    fleet.flush()
    fleet.barrier_worker()
    found: dict[str, np.ndarray] = {}
    if fleet.is_first_worker():
        stats = fleet.stats()
        print(f"steps: {stats['worker']['steps']}, heter: {stats['worker'].get('heter')}", flush=True)
        found["updates"] = np.array(max(server["tables"]["rows"]["step"] for server in stats["servers"]))
        with torch.no_grad():
            found["rows"] = model.rows(torch.arange(NUM_IDS)).numpy()
            found["predicted"] = model(torch.arange(NUM_IDS)).numpy()
        found |= {name: value.detach().numpy().copy() for name, value in model.named_parameters() if value.numel()}
    fleet.barrier_worker()
    fleet.stop_worker()
    return found


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="sync", choices=CONFIGS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after every step")
    parser.add_argument("--combined", type=int, default=0, help="in one process: the batches of this number of workers")
    parser.add_argument("--unguarded", action="store_true", help="no block for heter workers")
    parser.add_argument("--result", help="worker 0 writes its numbers there")
    parser.add_argument("--gates", default="", help="the folder of files that hold the workers: see gates.py")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    found = train(options)
    if found and options.result:
        np.savez(Path(options.result), **found)


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
