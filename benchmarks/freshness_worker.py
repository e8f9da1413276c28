"""The job of benchmarks.freshness: trains until it is told to stop, notes when it trained on a click, and saves."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet

NUM_SLOTS, DIM = 10, 8
FIRST_CLICK = 1 << 40  # ids of clicks are from here on: each is new
PAUSE = 0.25  # seconds between two clicks, on average


class Clicks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = fleet.nn.SparseEmbedding(DIM, initializer=fleet.nn.Uniform(-0.05, 0.05))
        relu = torch.nn.ReLU()
        self.deep = torch.nn.Sequential(
            torch.nn.Linear(NUM_SLOTS * DIM, 128), relu, torch.nn.Linear(128, 64), relu, torch.nn.Linear(64, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.deep(self.embedding(ids).flatten(1))
        return out.squeeze(1)


class Training:
    """Steps on drawn samples. `board`: the number of steps so far, which another process reads."""

    def __init__(self, folder: Path, batch: int, num_ids: int) -> None:
        self._folder, self._batch, self._num_ids = folder, batch, num_ids
        self._rng = np.random.default_rng(0)
        self._model = fleet.distributed_model(Clicks())
        strategy = fleet.DistributedStrategy(a_sync=True)
        self._optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(self._model.parameters(), lr=0.05), strategy)
        self._num_clicks, self._next_click, self._next_save = 0, 0.0, 0.0

    def run(self) -> None:
        fleet.init_worker()
        board = np.memmap(self._folder / "board", np.float64, "w+", shape=(1,))
        for _ in range(50):
            self._step([])
        fleet.save_persistables(str(self._folder / "model"))
        (self._folder / "ready").write_text(
            json.dumps({"servers": os.environ["FLEET_SERVER_ENDPOINTS"], "pid": os.getpid()})
        )
        with open(self._folder / "clicks", "a", encoding="ascii") as clicks:
            while not (self._folder / "stop").exists():
                self._step_with_click(clicks)
                board[0] += 1
                self._save_if_due()
        fleet.stop_worker()

    def _step_with_click(self, clicks: Any) -> None:
        if time.time() < self._next_click:
            self._step([])
            return
        self._num_clicks += 1
        self._next_click = time.time() + PAUSE * 2 * self._rng.random()
        self._step([FIRST_CLICK + self._num_clicks])
        clicks.write(f"{FIRST_CLICK + self._num_clicks} {time.time()!r}\n")
        clicks.flush()

    def _step(self, clicked: list[int]) -> None:
        ids = (self._rng.random((self._batch, NUM_SLOTS)) ** 3 * self._num_ids).astype(np.int64)
        for item in clicked:
            ids[0, 0] = item
        labels = (ids[:, 0] % 3 == 0).astype(np.float32)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            self._model(torch.from_numpy(ids)), torch.from_numpy(labels)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _save_if_due(self) -> None:
        """A delta every second, while it is asked for."""
        if time.time() > self._next_save and (self._folder / "saves").exists():
            self._next_save = time.time() + 1.0
            fleet.save_persistables(str(self._folder / "model"), mode=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--num_ids", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fleet.init()
    training = Training(options.folder, options.batch, options.num_ids)
    if fleet.is_server():
        (options.folder / "server_pid").write_text(str(os.getpid()))
        fleet.init_server()
        fleet.run_server()
    else:
        training.run()


if __name__ == "__main__":
    main()
