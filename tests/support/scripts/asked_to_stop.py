"""Trains for a number of steps, and says how it ended up; asked to end (SIGUSR1), it saves, and goes on when started
again."""

from __future__ import annotations

import argparse

import torch
from gates import gate

import torchfleet as fleet

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--gates", default="", help="a folder of gates")
options = parser.parse_args()

torch.manual_seed(0)
fleet.init()
embedding = fleet.nn.SparseEmbedding(2, name="words")
model = fleet.distributed_model(torch.nn.Sequential(embedding, torch.nn.Linear(2, 1)))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
saved = fleet.saved_extra(options.folder)
fleet.init_server(options.folder if saved else None)
fleet.init_worker(options.folder if saved else None)
first = saved["step"] if saved else 0
for step in range(first, options.steps):
    gate(options.gates, step)
    loss = (model(torch.arange(8) + step % 5) - step).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    fleet.stop_if_asked(options.folder, extra={"step": step + 1})  # the first call takes over the signal
    if step == first:
        print(f"training from step {step}", flush=True)
print(f"loss {loss.item().hex()}")
fleet.stop_worker()
