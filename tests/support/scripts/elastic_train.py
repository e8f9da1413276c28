"""Trains in fleet.elastic.run and writes each rank's final state; kills ranks of itself, each once.

elastic_train.py FOLDER [--steps N] [--copy_steps N] [--kill RANK:STEP:step|copy|forget ...] [flags of strategies]

`step`: in the step, between backward and the exchange of parameters. `copy`: in the copy behind the step, before it is
complete. `forget`: in the step, and its copies are lost, as with its machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from gates import gate
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.strategy.flags import add_arguments, strategy_of
from torchfleet.collective.elastic.memory_files import MemoryFile, MemoryFiles

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--copy_steps", type=int, default=3)
parser.add_argument("--save_step", type=int, default=0, help="save after that many steps")
parser.add_argument("--kill", nargs="*", default=[], metavar="RANK:STEP:WHERE")
parser.add_argument("--pause", type=float, default=0.0, help="seconds per step")
add_arguments(parser)
options = parser.parse_args()
rank = int(os.environ["RANK"])
begun = time.time()
calls = 0


def kill_if_planned(step: int, where: str) -> None:
    marker = options.folder / f"killed.{rank}.{step}.{where}"
    if f"{rank}:{step}:{where}" in options.kill and not marker.exists():
        marker.touch()
        if where == "forget":
            files = MemoryFiles.of_launcher()
            assert files is not None
            for file in (*files.own, *files.kept):
                file.begin()
        os.kill(os.getpid(), signal.SIGKILL)


whole = MemoryFile.complete


def complete(self: MemoryFile, step: int, num_bytes: int, description: bytes) -> None:
    kill_if_planned(step - 1, "copy")
    whole(self, step, num_bytes, description)


MemoryFile.complete = complete  # type: ignore[method-assign]


def make_model() -> torch.nn.Module:
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Dropout(0.1))
        for _ in range(3)
    ]
    return torch.nn.Sequential(torch.nn.Linear(6, 32), *blocks, torch.nn.Linear(32, 3))


def train() -> None:
    global calls
    calls += 1
    fleet.init(is_collective=True, strategy=strategy_of(options))
    torch.manual_seed(0)
    np.random.seed(rank)
    random.seed(rank)
    model = fleet.distributed_model(make_model())
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    torch.manual_seed(rank)  # each rank draws masks of its own
    index, number = fleet.data_shard()
    made = []
    folder = options.folder / "save"
    for step in fleet.elastic.steps(options.steps, str(folder), options.copy_steps, {"scheduler": scheduler}):
        made.append(step)
        print(f"step {step}", flush=True)
        gate(str(options.folder), step)
        x = torch.randn(24, 6, generator=torch.Generator().manual_seed(step)) + random.random() * np.random.rand()
        x = x.to(next(model.parameters()).device)
        y = x[:, :3].argmax(1)
        loss = F.cross_entropy(model(x[index::number]), y[index::number])
        loss.backward()
        kill_if_planned(step, "step")
        kill_if_planned(step, "forget")
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        time.sleep(options.pause)
        if step + 1 == options.save_step:
            fleet.save(str(folder), extra={"step": step + 1})
    state = {name: tensor_of(value) for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{i}.{key}"] = tensor_of(value)
    state["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
    torch.save({"state": state, "made": made, "calls": calls, "pid": os.getpid()}, options.folder / f"final.{rank}")
    fleet.stop_worker()


def tensor_of(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if hasattr(value, "to_local") else value).detach().clone()


fleet.elastic.run(train)
