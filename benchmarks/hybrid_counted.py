"""The worker of benchmarks.hybrid_kills: CTR-DNN in hybrid mode, beside rows of each step's own that count it."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import torchfleet as fleet
from benchmarks.chaos.ledger import Ids, audit, keys_of
from benchmarks.chaos.progress import Board

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_WARM = 25  # steps whose pauses do not count
_FLUSH = 5  # steps after which a worker makes sure of what it has sent


class Counted(torch.nn.Module):
    """`clicks`, and the rows of the ledger: every step takes 1 from its own, by SGD at rate 1."""

    def __init__(self, clicks: torch.nn.Module) -> None:
        super().__init__()
        self.clicks = clicks
        self.ledger = fleet.nn.SparseEmbedding(1, name="ledger", initializer=fleet.nn.Constant(0.0))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.clicks(ids, dense), self.ledger(own).sum()

    def groups(self) -> list[dict[str, Any]]:
        """The parameters, for an optimizer."""
        own = {"params": self.ledger.parameters(), "lr": 1.0, "row_rule": "sgd"}
        return [{"params": self.clicks.parameters()}, own]


def numbered(batches: Iterator[Batch], worker: int, first: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Every batch with the keys of its step's own rows."""
    for step, batch in zip(count(first), batches, strict=False):
        yield (*batch, torch.from_numpy(keys_of(worker, step, step + 1)))


def train(
    chosen: argparse.Namespace, model: torch.nn.Module, step: Callable[[], None],
    batches_from: Callable[[int], Iterator[Batch]],
) -> tuple[float, int]:  # fmt: skip
    """Train until there is a file, which worker 0 makes after its last step; others may be killed meanwhile. A worker
    that has joined again goes on with the batch behind the last one that it had begun: `batches_from(number)`. Returns
    the longest time between two steps, and the number of steps."""
    board = Board(Path(chosen.until).with_name("board"))
    mine = board.begin(fleet.worker_index(), int(os.environ.get("FLEET_RESTART", "0")))
    print(f"\nPID {os.getpid()}", flush=True)
    longest, before, first, number = 0.0, time.perf_counter(), mine.begun, 0
    source = fleet.prefetch(numbered(batches_from(first), mine.worker, first))
    for number, (ids, dense, clicked, own) in enumerate(source, start=1):
        mine.begin(first + number - 1)
        logits, counted = model(ids, dense, own)
        (F.binary_cross_entropy_with_logits(logits, clicked) + counted).backward()
        step()
        if mine.worker == 0 and number == chosen.steps:
            Path(chosen.until).touch()
        if number == 3:
            print("AT WORK", flush=True)
        if number % _FLUSH == 0:
            fleet.flush()
            mine.acknowledge()
        now = time.perf_counter()
        longest, before = max(longest, now - before if number > _WARM else 0.0), now
        time.sleep(chosen.pause)
    fleet.flush()
    mine.finish()
    return longest, number


def audited(chosen: argparse.Namespace, model: Counted) -> dict[str, int]:
    """What the servers have of the steps of all workers, when these are done: `lost` and `doubled` rows."""

    def read(keys: Ids) -> Any:
        return model.ledger(torch.from_numpy(keys)).detach().numpy().reshape(-1)

    model.eval()
    with torch.no_grad():
        found = audit(Board(Path(chosen.until).with_name("board")), read, 1.0, is_partial=False)
    return {name: found[name] for name in ("lost", "doubled")}
