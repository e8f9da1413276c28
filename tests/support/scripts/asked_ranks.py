"""Ranks that train until the job is asked to end, then save together."""

from __future__ import annotations

import sys
import time

import torch

import torchfleet as fleet

fleet.init(is_collective=True)
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(100_000):
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        print("training", flush=True)
    fleet.stop_if_asked(sys.argv[1], extra={"step": step + 1})
    time.sleep(0.05 * (1 + fleet.worker_index()))  # the ranks do not see the signal at the same moment
