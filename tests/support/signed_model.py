"""A model whose prediction shows which graph and which numbers computed it, and jobs that save it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.jobs import clean_facade

import torchfleet as fleet

IDS = torch.tensor([[1], [2]])


class Signed(torch.nn.Module):
    """sign × w × row: `sign` is code, and neither a parameter nor a buffer."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = sign
        self.rows = fleet.nn.SparseEmbedding(1, name="rows", initializer=fleet.nn.Uniform(1.0, 2.0))
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.sign * self.w * self.rows(ids).flatten()
        return found


@contextmanager
def job(sign: float, w: float, loaded: str | None = None, calls: bool = True) -> Iterator[Signed]:
    """A job in this process, before its next save. Its model's w is `w`, if it loads no model."""
    with clean_facade():
        fleet.init()
        model: Any = fleet.distributed_model(Signed(sign))
        with torch.no_grad():
            model.w.fill_(w)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        fleet.init_worker(loaded)
        try:
            if calls:
                model(IDS).sum().backward()
                optimizer.step()
            yield model
        finally:
            fleet.stop_worker()


def predictions(model: torch.nn.Module) -> list[float]:
    with torch.no_grad():
        found: list[float] = model.eval()(IDS).tolist()
    return found
