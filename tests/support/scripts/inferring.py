"""A model with every kind of parameter, trained and used for prediction in one job, or predicted with in another.

inferring.py train FOLDER MODE      train, save to FOLDER/model, predict in the same job
inferring.py predict FOLDER         as a job of its own
inferring.py local FOLDER           the same in a process without servers

Each worker writes what it found to FOLDER/WHAT-N."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet

NUM_ITEMS, NUM_WORDS = 40, 30


class Net(torch.nn.Module):
    """Rows by id with a declared size and a padding id, bags, rows of any id; means that run along; dropout; a part
    that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(NUM_ITEMS, 4, padding_idx=0, sparse=True)
        self.words = torch.nn.EmbeddingBag(NUM_WORDS, 3, mode="mean", sparse=True)
        self.users = fleet.nn.SparseEmbedding(5, name="users")
        self.norm = torch.nn.BatchNorm1d(4 + 3 + 5)
        self.frozen = torch.nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.drop = torch.nn.Dropout(0.5)
        self.out = torch.nn.Linear(12, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [self.items(batch["items"]), self.words(batch["words"]), self.users(batch["users"])]
        return self.out(self.drop(torch.tanh(self.frozen(self.norm(torch.cat(parts, dim=1))))))


def batch_of(seed: int, size: int = 16, new_users: bool = False) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    users = rng.integers(-(2**62), 2**62, size) if new_users else rng.integers(0, 50, size) * 1_000_003
    return {
        "items": torch.from_numpy(rng.integers(0, NUM_ITEMS, size)),
        "words": torch.from_numpy(rng.integers(0, NUM_WORDS, (size, 3))),
        "users": torch.from_numpy(users),
    }


def test_batches() -> list[dict[str, torch.Tensor]]:
    """Users that were trained on, and new ones."""
    return [batch_of(900), batch_of(901, new_users=True), batch_of(902, size=1)]


def train(model: torch.nn.Module, optimizer: Any, worker: int, num_steps: int = 6) -> None:
    model.train()
    for step in range(num_steps):
        batch = batch_of(100 * worker + step)
        torch.nn.functional.cross_entropy(model(batch), batch["items"] % 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def num_rows() -> dict[str, int]:
    """On all servers."""
    found: dict[str, int] = {}
    for server in fleet.stats()["servers"]:
        for name, table in server["tables"].items():
            found[name] = found.get(name, 0) + table["rows"]
    return found


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=0.05)


def strategy_of(mode: str) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy(sync_timeout=60.0)
    strategy.a_sync = mode == "async"
    return strategy


def predictions(infer: Any) -> dict[str, Any]:
    before = num_rows()
    scores = [infer.predict(batch) for batch in test_batches()]
    assert not any(score.requires_grad for score in scores)
    again = infer(test_batches()[0])
    return {"scores": scores, "again": again, "rows": [before, num_rows()]}


def main(what: str, folder: Path, mode: str = "async") -> None:
    torch.manual_seed(7)
    fleet.init()
    if what != "train":
        torch.manual_seed(8 + fleet.worker_index())  # nothing may depend on what the model was made with
        infer = fleet.DistributedInfer(Net())
        infer.init_distributed_infer_env(dirname=str(folder / "model"))
        if fleet.is_server():
            print("the server has served", flush=True)
            return
    else:
        model = fleet.distributed_model(Net())
        optimizer = fleet.distributed_optimizer(make_optimizer(model), strategy_of(mode))
        if fleet.is_server():
            fleet.init_server()
            fleet.run_server()
            return
        fleet.init_worker()
        train(model, optimizer, fleet.worker_index())
        fleet.flush()
        fleet.barrier_worker()
        if fleet.is_first_worker():
            fleet.save_inference_model(str(folder / "model"))
        infer = fleet.DistributedInfer(model)
        infer.init_distributed_infer_env()
    found, file = predictions(infer), folder / f"{what}-{fleet.worker_index()}"
    fleet.barrier_worker()
    fleet.stop_worker()
    try:
        infer.predict(test_batches()[0])
    except fleet.FleetError as error:
        found["too late"] = str(error)
    file.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
