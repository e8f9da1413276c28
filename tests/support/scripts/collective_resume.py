"""Trains on all ranks, saves every few steps, goes on from what is there; may kill a rank of itself once.

collective_resume.py MODEL LOSSES [--steps N] [--save_every N] [--kill RANK STEP] [flags of strategies]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.strategy.flags import add_arguments, strategy_of

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("losses", type=Path)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--save_every", type=int, default=4)
parser.add_argument("--kill", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"))
parser.add_argument("--rows", type=int, default=24, help="of a global batch, dealt out over the ranks")
add_arguments(parser)
options = parser.parse_args()

fleet.init(is_collective=True, strategy=strategy_of(options))
torch.manual_seed(0)
model = fleet.distributed_model(torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
first = fleet.load(options.model)["step"] if fleet.saved_extra(options.model) else 0
index, number = fleet.data_shard()
for step in range(first, options.steps):
    data = torch.Generator().manual_seed(step)
    x = torch.randn(options.rows, 6, generator=data)
    y = x[:, :3].argmax(1)
    loss = F.cross_entropy(model(x[index::number]), y[index::number])
    loss.backward()
    if [fleet.worker_index(), step] == list(options.kill) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    mean = fleet.util.all_reduce(loss.item()) / number
    if fleet.is_first_worker():
        with open(options.losses, "a") as file:
            print(step, fleet.worker_num(), repr(mean), file=file)
    if (step + 1) % options.save_every == 0:
        fleet.save(options.model, extra={"step": step + 1})
fleet.stop_worker()
