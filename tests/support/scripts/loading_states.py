"""Workers that train, load a state that a plain model had, go on, and write down their states: in any mode."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel

import torchfleet as fleet


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(30, 4, sparse=True)
        self.tower = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.items(ids).flatten(1)).squeeze(1)


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 30, (8, 2), generator=torch.Generator().manual_seed(number))


def main(settings: str, loaded: str, out: str) -> None:
    fleet.init()
    model = fleet.distributed_model(Model())
    strategy = fleet.DistributedStrategy(sync_timeout=60.0, **json.loads(settings))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    worker, averaged = fleet.worker_index(), AveragedModel(model)
    for number in range(3):
        model(batch(10 * worker + number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    fleet.barrier_worker()
    model.load_state_dict(torch.load(loaded, weights_only=True))
    states = {"loaded": copy.deepcopy(model.state_dict())}
    plain = fleet.to_plain(model).eval()
    model.eval()
    with torch.no_grad():
        states |= {"predicted": model(batch(99)), "plain": plain(batch(99)), "copied": copy.deepcopy(model)(batch(99))}
        averaged.eval()(batch(99))
    fleet.barrier_worker()
    model.train()
    model(batch(worker)).square().mean().backward()
    optimizer.step()
    fleet.flush()
    fleet.barrier_worker()
    states["trained"] = copy.deepcopy(model.state_dict())
    torch.save(states, Path(out) / f"worker-{worker}.pt")
    fleet.barrier_worker()
    fleet.stop_worker()


if __name__ == "__main__":
    main(*sys.argv[1:])
