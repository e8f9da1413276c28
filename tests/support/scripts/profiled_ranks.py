"""A small collective job that trains until it is ended, or for a number of steps."""

from __future__ import annotations

import sys
import time

import torch

import torchfleet as fleet


def main() -> None:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    model = fleet.distributed_model(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(int(sys.argv[1])):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    fleet.stop_worker()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
