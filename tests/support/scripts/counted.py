"""A job whose result is known to the last bit: every step adds the same to the same rows. For fleetrun in tests."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import torch

import torchfleet as fleet

RATE = 0.125
NUM_IDS = 64


class Counted(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(dim, name="rows", initializer=fleet.nn.Constant(0.0))
        self.dense = torch.nn.Parameter(torch.zeros(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + self.dense.sum()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    fleet.init()
    strategy = fleet.DistributedStrategy(a_sync=options.mode != "sync")
    model = fleet.distributed_model(Counted(options.dim))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=RATE), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    ids = torch.arange(NUM_IDS)
    fill(model, options)
    num_steps, longest, last = 0, 0.0, time.monotonic()
    print(f"worker {fleet.worker_index()} is training", flush=True)
    while num_steps < options.steps and not is_over(options, num_steps):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if num_steps % 20 == 0:
            print(f"step {num_steps}", flush=True)
    fleet.flush()
    counts = fleet.util.all_gather(num_steps)
    fleet.barrier_worker()
    with torch.no_grad():
        model(ids)
        found = model.rows(ids)
    expected = -RATE * (sum(counts) if strategy.a_sync else num_steps)
    wrong = int((found != expected).sum())
    print(
        f"{sum(counts)} steps, {wrong} numbers are wrong; dense {model.dense.tolist()}, expected {expected}", flush=True
    )
    print(f"longest step {longest:.3f} s", flush=True)
    fleet.stop_worker()


def is_over(options: argparse.Namespace, num_steps: int) -> bool:
    """In sync mode all workers make the same number of steps, and none is two ahead of another: the first one that
    finds the file says which step is the last."""
    if not Path(options.until).exists():
        return False
    if options.mode != "sync":
        return True
    last = Path(f"{options.until}.last")
    with contextlib.suppress(FileExistsError):
        last.symlink_to(str(num_steps + 2))  # made in one step with what it says
    return num_steps >= int(os.readlink(last))


def fill(model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Rows that nothing happens to, for a table of some size."""
    with torch.no_grad():
        for start in range(0, options.filling, 1 << 16):
            model.rows(torch.arange(start, min(start + (1 << 16), options.filling)) + (1 << 20))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="async", choices=["sync", "async"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--until", default="/nowhere", help="stop as soon as this file exists")
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--filling", type=int, default=0, help="rows beside those that are trained")
    return parser.parse_args()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    sys.exit(main())
