"""A worker that trains on the attacked server until it is ended: started as a process by benchmarks.abuse --training.

python -m benchmarks.abuse_training WORKER ENDPOINT [KEYS]
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.abuse_attacks import TRAINED
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.wire import Role
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

_BATCH, _SLOTS, _NUM_IDS = 256, 26, 200_000


def train(client: Client, worker: int) -> None:
    """Steps of a small network of clicks, one after the other, on one thread: it keeps one core busy."""
    torch.set_num_threads(1)
    client.attach(TRAINED)
    rng = np.random.default_rng(worker)
    width = _SLOTS * TRAINED.dim
    tower = torch.nn.Sequential(torch.nn.Linear(width, 400), torch.nn.ReLU(), torch.nn.Linear(400, 1))
    optimizer = torch.optim.SGD(tower.parameters(), 0.01)
    for step in itertools.count(1):
        keys = rng.integers(0, _NUM_IDS, _BATCH * _SLOTS).astype(np.uint64)
        rows = torch.from_numpy(client.pull(TRAINED.name, keys).result()).requires_grad_()
        loss = tower(rows.view(_BATCH, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert rows.grad is not None
        client.push(TRAINED.name, keys, rows.grad.numpy()).result()
        if step == 1:
            print("trains", flush=True)


def main() -> None:
    worker, endpoint, *key_dir = sys.argv[1:]
    keys: Any = KeyFolder(key_dir[0]) if key_dir else None
    with Client.connect([endpoint], keys, role=Role.WORKER, worker=int(worker), patience=Patience(60.0, 2)) as client:
        train(client, int(worker))


if __name__ == "__main__":
    main()
