"""A job whose worker fails after ten steps, and is slow when it is started again: it waits for a file before init().

Every step takes 1 from every row, so a row counts the steps. The second process makes ten more, and prints the sum.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import torchfleet as fleet

STEPS = 10


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(2, name="rows", initializer=fleet.nn.Constant(0.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gate", type=Path, help="the file for which the second process waits")
    gate = parser.parse_args().gate
    is_second = os.environ.get("FLEET_ROLE") == "WORKER" and os.environ.get("FLEET_RESTART", "0") != "0"
    while is_second and not gate.exists():
        time.sleep(0.1)
    fleet.init()
    model = fleet.distributed_model(Model())
    strategy = fleet.DistributedStrategy(a_sync=True)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    ids = torch.arange(8)
    for _ in range(STEPS):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.flush()
    if not is_second:
        raise RuntimeError("the first process of this worker was told to fail")
    with torch.no_grad():
        print(f"steps counted: {-model.rows(ids)[:, 0].mean().item():g}", flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
