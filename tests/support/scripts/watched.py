"""A job that makes some steps, says so, and stays until a file is there: its numbers hold still to be compared."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import torchfleet as fleet

STEPS, BATCH = 40, 16


def main(kind: str, until: str) -> None:
    is_collective = kind == "collective"
    fleet.init(is_collective=is_collective)
    torch.manual_seed(0)
    if is_collective:
        layers = torch.nn.Sequential(torch.nn.Embedding(100, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    else:
        layers = torch.nn.Sequential(
            fleet.nn.SparseEmbedding(4, name="rows"), torch.nn.Flatten(), torch.nn.Linear(8, 1)
        )
    model = fleet.distributed_model(layers)
    strategy = None if is_collective else fleet.DistributedStrategy(a_sync=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    if not is_collective:
        fleet.init_worker()
    sys.stdout.buffer.write("größer\nWARNING: half a ".encode() + b"\xff")
    sys.stdout.flush()
    for _ in range(STEPS):
        ids = torch.arange(2 * BATCH).view(BATCH, 2) + 32 * fleet.worker_index()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    print(" line", flush=True)
    if not is_collective:
        fleet.flush()
    deadline = time.monotonic() + 90
    while not Path(until).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
        fleet.report(loss=loss.item(), index=float(fleet.worker_index()))
    if kind == "fail":
        raise RuntimeError("told to fail")
    fleet.stop_worker()


if __name__ == "__main__":
    main(*sys.argv[1:])
