"""The model and the data of the contenders that are torch programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.peers import clicks

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Clicks(torch.nn.Module):
    """`rows`: a layer that maps ids (samples, 26) to (samples, 26 × dim) or (samples, 26, dim). The tower begins with
    the same values however many numbers `rows` has drawn.
    """

    def __init__(self, rows: torch.nn.Module, chosen: argparse.Namespace) -> None:
        super().__init__()
        self.rows, dim = rows, chosen.dim
        torch.manual_seed(chosen.seed)
        width = clicks.NUM_IDS * dim + clicks.NUM_DENSE
        self.tower = torch.nn.Sequential(
            torch.nn.Linear(width, clicks.HIDDEN), torch.nn.ReLU(), torch.nn.Linear(clicks.HIDDEN, 1)
        )

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tower(torch.cat([self.rows(ids).flatten(1), dense], dim=1)).squeeze(1)
        return found


def plain_rows(chosen: argparse.Namespace) -> torch.nn.Embedding:
    rows = torch.nn.Embedding(clicks.num_rows(chosen), chosen.dim, sparse=True)
    torch.nn.init.uniform_(rows.weight, -clicks.INITIAL, clicks.INITIAL)
    return rows


def loader(rows: clicks.Rows, size: int) -> torch.utils.data.DataLoader[Any]:
    """Batches of a DataLoader, in the order of the rows. Whole batches are cut: its collation of samples one by one
    would take longer than a step.
    """
    tensors = tuple(torch.from_numpy(column) for column in rows)
    starts = list(range(0, len(rows[0]) - size + 1, size))
    cut = [tuple(tensor[start : start + size] for tensor in tensors) for start in starts]
    return torch.utils.data.DataLoader(cut, batch_size=None)  # type: ignore[arg-type]


def parts(chosen: argparse.Namespace) -> tuple[Any, Any, int]:
    """(to warm up, to train on, samples of the latter) of this worker."""
    rows = clicks.share(chosen)
    first = clicks.WARM * chosen.batch
    warm, own = (tuple(column[some] for column in rows) for some in (slice(0, first), slice(first, None)))
    made = loader(own, chosen.batch)  # type: ignore[arg-type]
    return loader(warm, chosen.batch), made, len(made) * chosen.batch  # type: ignore[arg-type]


def trainer(model: Any, step: Callable[[], None], prefetch: Callable[[Any], Iterable[Batch]]) -> Callable[[Any], None]:
    """A loop over a loader; `step` applies the gradients and drops them."""

    def train(data: Any) -> None:
        for ids, dense, label in prefetch(data):
            F.binary_cross_entropy_with_logits(model(ids, dense), label).backward()  # type: ignore[no-untyped-call]
            step()

    return train


@torch.no_grad()
def test_auc(model: torch.nn.Module, chosen: argparse.Namespace) -> float:
    ids, dense, label = clicks.held_out(chosen)
    model.eval()
    inputs = torch.utils.data.TensorDataset(torch.from_numpy(ids), torch.from_numpy(dense))
    scores = [model(*part) for part in torch.utils.data.DataLoader(inputs, batch_size=4096)]
    return clicks.auc(torch.cat(scores).numpy(), label)


def stepping(*optimizers: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step
