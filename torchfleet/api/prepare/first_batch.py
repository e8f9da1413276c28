"""Estimates how many rows a batch of a loader looks up, from the shapes of its tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from torchfleet.api.prepare.loader_shard import iterates_by_itself
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.batch.batch_tensors import tensors_of


def num_lookups(loader: DataLoader[Any]) -> int | None:
    """The number of elements in the largest integer tensor of a batch; None if it cannot be known.

    Reads one batch of samples from all over the dataset, in a worker process if the loader has any, and restores the
    states of the random number generators. None for an IterableDataset, which may yield its samples only once, and for
    a sampler of the user's or a class with its own `__iter__`, whose batches only they know.
    """
    if iterates_by_itself(loader):
        return None
    samplers = (loader.sampler, loader.batch_sampler)
    is_known = all(one is None or type(one).__module__.startswith("torch.utils.data.") for one in samplers)
    if isinstance(loader.dataset, IterableDataset) or not is_known or not hasattr(loader.dataset, "__len__"):
        return None
    total = len(loader.dataset)
    size = min(total, getattr(loader.batch_sampler, "batch_size", 1))
    indexes = [place * total // size for place in range(size)]
    if not indexes:
        return None
    order: dict[str, Any] = {"batch_sampler": [indexes]}
    if loader.batch_sampler is None:
        order = {"batch_size": None, "sampler": indexes}
    names = ("collate_fn", "timeout", "worker_init_fn", "multiprocessing_context")
    options = {name: getattr(loader, name) for name in names}
    try:
        with _kept_random_numbers():
            batch = next(iter(DataLoader(loader.dataset, num_workers=min(1, loader.num_workers), **order, **options)))
    except Exception as error:
        raise FleetError(
            f"fleet.prepare(sparse='auto') looks at one batch of the first loader, also on servers, and its data set "
            f"failed: {type(error).__name__}: {error}. Where servers have no data, choose the tables without it: "
            "sparse=ROWS moves those with at least that many rows, and sparse=True on an embedding moves this one."
        ) from error
    found = [tensor for tensor in tensors_of(batch).values() if not tensor.is_floating_point()]
    return max((tensor.numel() for tensor in found if tensor.dtype != torch.bool), default=None)


@contextmanager
def _kept_random_numbers() -> Iterator[None]:
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)
