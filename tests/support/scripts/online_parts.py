"""Parts to test the pass loop with, a tiny model, and what a saved model holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.scripts import online_job
from support.scripts.saved_models import contents, load

import torchfleet as fleet
from torchfleet.apps import online
from torchfleet.apps.online.parts import time_of
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.comparison import compare
from torchfleet.ps.checkpoint.manifest import read_manifest

HOURS = online_job.hours("20261115/21", 6)  # three of one day, three of the next


class Parts:
    """A source of parts that are there from the beginning; some of them only after a number of questions."""

    def __init__(self, names: list[str] | None = None, after: dict[str, int] | None = None) -> None:
        self.names = HOURS if names is None else names
        self.after = after or {}
        self.num_asked = 0
        self.done_parts: list[str] = []

    def next(self, position: Any) -> online.Part | None:
        self.num_asked += 1
        rest = self.names[position or 0 :]
        if not rest or self.num_asked <= self.after.get(rest[0], 0):
            return None
        day, hour = rest[0].split("/")
        return online.Part(rest[0], time_of(day, int(hour)), day, int(hour), (position or 0) + 1, [rest[0]])

    def is_over(self, position: Any) -> bool:
        return position == len(self.names)

    def files_of(self, part: online.Part, worker: int, num_workers: int) -> list[str]:
        return [f"{part.name} {worker} of {num_workers}"]

    def done(self, part: online.Part) -> None:
        self.done_parts.append(part.name)


class Tiny(torch.nn.Module):
    def __init__(self, policy: Any = None) -> None:
        super().__init__()
        self.ids = fleet.nn.SparseEmbedding(2, name="ids", **({"shrink": policy} if policy is not None else {}))
        self.out = torch.nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.ids(ids)).squeeze(1)


def step(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    ids = torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(seed))
    (model(ids) - ids % 2).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def held(folder: str | Path) -> tuple[Any, dict[str, Any]]:
    """(every row and dense element with its state, what is kept about the passes)."""
    manifest = read_manifest(Storage(str(folder)))
    return contents(load(1, [table.spec() for table in manifest.tables], str(folder))), manifest.extra


def assert_same(found: str | Path, wanted: str | Path) -> None:
    """Rows, their statistics, keys not admitted yet, dense parameters, and what is kept about the passes."""
    assert held(found) == held(wanted)
    assert compare(str(found), str(wanted)).is_equal
