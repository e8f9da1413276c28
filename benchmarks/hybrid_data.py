"""The samples of benchmarks.hybrid: clicks that depend on ids and numbers. No sample is trained twice, so that what a
model has learned depends on how many samples it has seen, and on nothing that it could know by heart."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

NUM_SLOTS, NUM_DENSE, NUM_IDS = 26, 13, 2000
NUM_TESTED = 20_000
_TEST = 7  # seed
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@functools.cache
def effects_of_ids() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(NUM_SLOTS, NUM_IDS)) / 3


def made(seed: int | tuple[int, ...], num: int) -> Batch:
    """Samples whose clicks depend on ids and numbers, the same way for all seeds."""
    effects = effects_of_ids()
    rng = np.random.default_rng(seed)
    ids = (NUM_IDS * rng.random((num, NUM_SLOTS)) ** 3).astype(np.int64)
    dense = rng.normal(size=(num, NUM_DENSE)).astype(np.float32)
    logits = effects[np.arange(NUM_SLOTS), ids].sum(1) + dense[:, 0] * dense[:, 1]
    clicked = (rng.random(num) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    keys = ids + NUM_IDS * np.arange(NUM_SLOTS)
    return torch.from_numpy(keys), torch.from_numpy(dense), torch.from_numpy(clicked)


def tested() -> Batch:
    return made(_TEST, NUM_TESTED)


def numbered(seed: int, worker: int, size: int, first: int = 0) -> Iterator[Batch]:
    """The batches of a worker from number `first` on; endless, and others of every worker and seed."""
    return (made((seed, worker, number), size) for number in itertools.count(first))


def batches(seed: int, worker: int, size: int, num: int) -> Iterator[Batch]:
    """As `numbered`. The first `num` are made now, and not while a clock runs."""
    return itertools.chain(list(itertools.islice(numbered(seed, worker, size), num)), numbered(seed, worker, size, num))


def new_batches(worker: int, size: int, until: Path, first: int) -> Iterator[Batch]:
    """As `numbered`, until there is a file."""
    source = numbered(0, worker, size, first)
    while not until.exists():
        yield next(source)


def auc_of(scores: torch.Tensor, clicked: torch.Tensor) -> float:
    ranks = scores.double().argsort().argsort().double() + 1
    positive = clicked > 0
    num = int(positive.sum())
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * (len(ranks) - num)))
