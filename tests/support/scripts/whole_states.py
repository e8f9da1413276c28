"""A script of fleet.prepare that is interrupted within an epoch and goes on: dropout, shuffled data, a scheduler, and
terms of the loss from the random numbers of Python and numpy. Writes its losses to a file per worker."""

from __future__ import annotations

import argparse
import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchfleet as fleet

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "hybrid": {"a_sync": True, "a_sync_configs": {"hybrid": True}},
    "servers": {"a_sync": True, "a_sync_configs": {"hybrid": True, "exchange": "servers"}},
}
NUM_IDS, EPOCHS = 50, 3


def prepared(mode: str | None = None, dirname: str | None = None, batch_size: int = 8) -> tuple[Any, ...]:
    """(model, optimizer, loader, scheduler); every worker has random numbers of its own. mode None: collective."""
    index = fleet.worker_index()
    torch.manual_seed(3 + index)
    random.seed(1 + index)
    np.random.seed(2 + index)
    model = torch.nn.Sequential(
        torch.nn.Embedding(NUM_IDS, 4, sparse=mode is not None),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(12, 1),
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(NUM_IDS, (40, 3), generator=drawn), torch.rand(40, 1, generator=drawn))
    strategy = None if mode is None else fleet.DistributedStrategy(**MODES[mode])
    loader = DataLoader(data, batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return fleet.prepare(model, optimizer, loader, scheduler, strategy=strategy, dirname=dirname)


def train(things: tuple[Any, ...], first: int = 0, stop: int = -1, save: str = "", keep: Any = None) -> list[float]:
    """The losses. After `stop` steps the state is saved, and training goes on."""
    model, optimizer, loader, scheduler = things
    losses = []
    for epoch in range(first, EPOCHS):
        for ids, y in loader:
            noise = 0.01 * (random.random() + np.random.rand())
            loss = (model(ids) - y + noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            if len(losses) == stop:
                fleet.save_state(save, keep, extra={"epoch": epoch})
    return losses


def by_state_dicts(things: tuple[Any, ...], file: Path) -> list[str]:
    """Train, let worker 0 save both states, train on, and load them. Returns the entries that have not come back."""
    model, optimizer, loader, _ = things

    def one_epoch() -> None:
        for ids, y in loader:
            (model(ids) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    one_epoch()
    fleet.barrier_worker()
    if fleet.is_first_worker():
        torch.save([model.state_dict(), optimizer.state_dict()], file)
    fleet.barrier_worker()
    one_epoch()
    of_model, of_optimizer = torch.load(file, weights_only=True)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(copy.deepcopy(of_optimizer))
    fleet.barrier_worker()
    found, states = model.state_dict(), optimizer.state_dict()["state"]
    wrong = [name for name, value in of_model.items() if not torch.equal(found[name], value)]
    for number, state in of_optimizer["state"].items():
        wrong += [f"{number} {name}" for name, value in state.items() if not torch.equal(states[number][name], value)]
    fleet.barrier_worker()
    one_epoch()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--stop", type=int, default=-1)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--dicts", action="store_true")
    options = parser.parse_args()
    fleet.init(is_collective=options.mode is None)
    saved = str(options.folder / "model")
    is_served = options.mode is not None
    things = prepared(options.mode, saved if options.load and is_served else None)
    if options.dicts:
        wrong = by_state_dicts(things, options.folder / "state.pt")
        (options.folder / f"wrong.{fleet.worker_index()}").write_text(json.dumps(wrong))
        return
    first = fleet.load_state(saved)["epoch"] if options.load else 0
    losses = train(things, first, options.stop, saved)
    name = f"{'resumed' if options.load else 'straight'}.{fleet.worker_index()}"
    (options.folder / name).write_text(json.dumps(losses))
    fleet.stop_worker()


if __name__ == "__main__":
    main()
