"""Shards a torch DataLoader over workers: every worker draws the same order and takes its share of each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from torchfleet.base.errors import FleetError

Item = TypeVar("Item")


def shared_loader(loader: DataLoader[Any], index: int, num: int, agree: Callable[[bytes], bytes]) -> DataLoader[Any]:
    """The loader of worker `index` of `num`, with the same batch size, order, collate function and worker processes.

    `agree` returns the bytes of worker 0: the state of the random generator that shuffles samples. All workers must
    call this together. A loader with torch's DistributedSampler is already sharded and is returned unchanged.
    """
    if type(loader) is not DataLoader:
        raise FleetError(
            f"fleet.prepare: expected a torch.utils.data.DataLoader itself, found a {type(loader).__name__}. Give it "
            "the samples of this worker (fleet.data_shard says which), and iterate fleet.prefetch(loader)."
        )
    if num == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        samples = SampleShard(loader.dataset, index, num)
        return DataLoader(samples, loader.batch_size, drop_last=loader.drop_last, **_options(loader))
    _agree_on_order(loader, agree)
    if loader.batch_sampler is None:
        order = OrderShard(loader.sampler, index, num)
        return DataLoader(loader.dataset, batch_size=None, sampler=order, **_options(loader))
    batches = BatchShard(loader.batch_sampler, index, num)
    return DataLoader(loader.dataset, batch_sampler=batches, **_options(loader))


class BatchShard(Sampler[list[Any]]):
    """Yields the batch at position `index` of every `num` consecutive batches.

    The remaining batches at the end are redistributed by sample, so that all workers have the same number of batches;
    the last one may be shorter. If fewer samples than workers remain, some samples are used twice. With drop_last,
    remaining batches are dropped.
    """

    def __init__(self, batches: Any, index: int, num: int) -> None:
        self._batches, self._index, self._num = batches, index, num
        self._drops = bool(getattr(batches, "drop_last", False))

    def __iter__(self) -> Iterator[list[Any]]:
        rest: list[list[Any]] = []
        for taken in _rounds(self._batches, self._num):
            rest = taken
            if len(taken) == self._num:
                yield taken[self._index]
        samples = [sample for batch in rest for sample in batch]
        if not self._drops and len(rest) < self._num and samples:
            samples = [samples[i % len(samples)] for i in range(max(len(samples), self._num))]
            start, stop = (place * len(samples) // self._num for place in (self._index, self._index + 1))
            yield samples[start:stop]

    def __len__(self) -> int:
        return (len(self._batches) + (0 if self._drops else self._num - 1)) // self._num


class _OneOfEvery:
    """Yields the item at position `index` of every `num` consecutive items, the same number for every worker.

    If the last round is short, some of its items are used twice.
    """

    def __init__(self, items: Any, index: int, num: int) -> None:
        self._items, self._index, self._num = items, index, num

    def __iter__(self) -> Iterator[Any]:
        for taken in _rounds(self._items, self._num):
            yield taken[self._index % len(taken)]

    def __len__(self) -> int:
        return (len(self._items) + self._num - 1) // self._num


class OrderShard(_OneOfEvery, Sampler[Any]):
    """A worker's share of a sampler."""


class SampleShard(_OneOfEvery, IterableDataset[Any]):
    """A worker's share of a stream of samples."""


def _rounds(items: Iterable[Item], num: int) -> Iterator[list[Item]]:
    """Lists of `num` items; the last one may be shorter."""
    taken: list[Item] = []
    for item in items:
        taken.append(item)
        if len(taken) == num:
            yield taken
            taken = []
    if taken:
        yield taken


def _agree_on_order(loader: DataLoader[Any], agree: Callable[[bytes], bytes]) -> None:
    """Give the sampler worker 0's random state. A sampler without one must yield the same order on all workers."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not hasattr(sampler, "generator"):
        return
    if sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(torch.initial_seed())
    state = agree(sampler.generator.get_state().numpy().tobytes())
    sampler.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    more = ("generator", "prefetch_factor", "persistent_workers", "pin_memory_device")
    return {name: getattr(loader, name) for name in (*names, *more)}
