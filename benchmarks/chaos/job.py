"""The job that is disturbed, all roles of it: clicks with hidden weights, beside rows that count steps."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from benchmarks.chaos.ledger import Ids, audit, keys_of
from benchmarks.chaos.progress import Board, Progress

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"a_sync": True},
    "half_async": {"a_sync": True, "a_sync_configs": {"half_async": True}},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 10}},
    "hybrid": {"a_sync": True, "a_sync_configs": {"hybrid": True}},
}
BATCH, SLOTS, DIM, NUM_IDS = 128, 8, 8, 20_000
_FLUSH = 25  # steps after which a worker makes sure of what it has sent
_TEST = 40  # batches
_WAIT = 120.0  # seconds for other workers to leave

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Clicks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM, name="rows", initializer=fleet.nn.Uniform(-0.05, 0.05))
        self.ledger = fleet.nn.SparseEmbedding(1, name="ledger", initializer=fleet.nn.Constant(0.0))
        self.tower = torch.nn.Sequential(torch.nn.Linear(SLOTS * DIM, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the sum of the step's own rows."""
        return self.tower(self.rows(ids).flatten(1)).squeeze(1), self.ledger(own).sum()


class Data:
    """Samples by worker and step: the same ones in every run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._weights = np.random.default_rng([seed, 1]).normal(0.0, 0.8, NUM_IDS)

    def batch(self, worker: int, step: int) -> Batch:
        dice = np.random.default_rng([self._seed, 2, worker, step])
        ids = (NUM_IDS * dice.random((BATCH, SLOTS)) ** 3).astype(np.int64)  # few are frequent
        chances = 1 / (1 + np.exp(-self._weights[ids].sum(axis=1)))
        labels = (dice.random(BATCH) < chances).astype(np.float32)
        own = keys_of(worker, step, step + 1)
        return torch.from_numpy(ids), torch.from_numpy(own), torch.from_numpy(labels)


def batches(data: Data, board: Board, worker: int, first: int) -> Iterator[Batch]:
    """Until the board says that it is the end."""
    for step in count(first):
        if board.end and step >= board.end:
            return
        yield data.batch(worker, step)


def make_optimizer(model: Clicks, mode: str) -> torch.optim.Optimizer:
    trained: dict[str, Any] = {"params": [*model.rows.parameters(), *model.tower.parameters()]}
    if mode == "geo":
        return torch.optim.SGD([trained, {"params": model.ledger.parameters(), "lr": 1.0}], lr=1.0)
    own = {"params": model.ledger.parameters(), "lr": 1.0, "row_rule": "sgd"}
    return torch.optim.Adagrad([trained, own], lr=0.05)


def main() -> None:
    chosen = parse()
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)
    fleet.init()
    model = Clicks()
    fleet.distributed_model(model)
    strategy = fleet.DistributedStrategy(**MODES[chosen.mode])
    optimizer = fleet.distributed_optimizer(make_optimizer(model, chosen.mode), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    board = Board(Path(chosen.board))
    mine = board.begin(fleet.worker_index(), int(os.environ.get("FLEET_RESTART", "0")))
    train(model, optimizer, board, mine, chosen)
    leave(model, board, mine, chosen)


def train(model: Clicks, optimizer: Any, board: Board, mine: Progress, chosen: argparse.Namespace) -> None:
    data, step = Data(chosen.seed), mine.begun
    for ids, own, labels in fleet.prefetch(batches(data, board, mine.worker, step)):
        mine.begin(step)
        logits, counted = model(ids, own)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels) + counted
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine.end(step)
        step += 1
        if step % _FLUSH == 0 and chosen.mode != "geo":  # which sends a share of what it has
            fleet.flush()
            mine.acknowledge()
        if chosen.save_every and step % chosen.save_every == 0 and fleet.is_first_worker():
            fleet.save_persistables(str(board.folder / "saves"))


def leave(model: Clicks, board: Board, mine: Progress, chosen: argparse.Namespace) -> None:
    """Everything is with the servers; the first worker says what they have."""
    fleet.flush()
    if chosen.mode != "geo":
        mine.finish()
        fleet.barrier_worker()
    if fleet.is_first_worker():
        if chosen.mode == "geo":  # who sends the rest of his differences when he leaves
            mine.finish()
            wait_for_others(board)
            fleet.flush()
        one = 1.0 / fleet.worker_num() if chosen.mode == "sync" else 1.0
        found = {**audit(board, lambda keys: read(model, keys), one, chosen.mode == "geo"), **test(model, chosen.seed)}
        if chosen.mode == "sync":
            fleet.save_persistables(str(board.folder / "model"))
        (board.folder / "result.json").write_text(json.dumps(found))
    fleet.stop_worker()
    mine.finish()


def wait_for_others(board: Board) -> None:
    deadline = time.monotonic() + _WAIT
    newest = [board.of(worker)[-1] for worker in range(fleet.worker_num())]
    while not all(progress.is_done for progress in newest):
        if time.monotonic() > deadline:
            raise RuntimeError(f"a worker has not left after {_WAIT:g} s")
        time.sleep(0.05)


def read(model: Clicks, keys: Ids) -> Any:
    with torch.no_grad():
        return model.ledger(torch.from_numpy(keys)).numpy().reshape(-1)


def test(model: Clicks, seed: int) -> dict[str, float]:
    """AUC and loss of held-out samples."""
    data, meter, losses = Data(seed), fleet.metrics.AUC(), []
    model.eval()
    with torch.no_grad():
        for number in range(_TEST):
            ids, own, labels = data.batch(1 << 20, number)
            logits, _ = model(ids, own)
            meter.update(logits, labels)
            losses.append(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item())
    return {"auc": float(meter.compute()[0]), "loss": float(np.mean(losses))}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True, choices=MODES)
    parser.add_argument("--board", required=True, help="folder of the workers' progress")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save_every", type=int, default=0, help="steps of worker 0 between two saves; 0: none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
