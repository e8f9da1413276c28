"""Samples in memory as columns of equal length: the last are held out, the rest is dealt to workers in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

Columns = dict[str, torch.Tensor]  # by the name of the feature; the first dimension is that of the samples

_CHUNK = 4096  # samples at once in prediction


def num_samples(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def split(columns: Columns, held_out: float = 0.1) -> tuple[Columns, Columns]:
    """(samples to train on, the last ones, which are held out)."""
    cut = int(num_samples(columns) * (1 - held_out))
    first = {name: column[:cut] for name, column in columns.items()}
    return first, {name: column[cut:] for name, column in columns.items()}


class Batches:
    """A worker's share, in an order of its own; all workers get as many batches, as sync mode needs."""

    def __init__(self, columns: Columns, batch_size: int, worker: int, num_workers: int, seed: int) -> None:
        num = num_samples(columns) // num_workers // batch_size
        if not num:
            raise SystemExit(
                f"{num_samples(columns)} samples are not a batch of {batch_size} for each of {num_workers} workers: "
                "give more samples or a smaller --batch_size"
            )
        own = np.arange(worker, num_samples(columns), num_workers)
        order = np.random.default_rng([seed, worker]).permutation(own)[: num * batch_size]
        self._columns, self._places = columns, torch.from_numpy(order).split(batch_size)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Columns]:
        for places in self._places:
            yield {name: column[places] for name, column in self._columns.items()}


@torch.no_grad()
def predicted(model: Callable[[Columns], torch.Tensor], columns: Columns) -> torch.Tensor:
    """What the model says of every sample, in their order."""
    parts = zip(*(column.split(_CHUNK) for column in columns.values()), strict=True)
    return torch.cat([model(dict(zip(columns, part, strict=True))) for part in parts])


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Probability that a sample with label 1 scores above one with label 0; ties count half."""
    _, inverse, counts = np.unique(scores.numpy(), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = labels.numpy() > 0
    num = positive.sum()
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * (len(ranks) - num)))
