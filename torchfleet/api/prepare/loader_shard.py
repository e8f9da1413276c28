"""Shards a torch DataLoader over workers: every worker draws the same order and takes its share of each round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from torchfleet.api.prepare.shared_order import Agree, SharedOrder
from torchfleet.base.errors import FleetError

Item = TypeVar("Item")


def shared_loader(
    loader: DataLoader[Any], index: int, num: int, agree: Agree, each_pass: bool = True, name: str = "a loader"
) -> DataLoader[Any]:
    """The loader of worker `index` of `num`, with the same batch size, order, collate function and worker processes.

    `agree` returns the bytes of worker 0, and all workers must call this together. `each_pass`: whether workers meet at
    the beginning of every pass, to use worker 0's random state at that moment (SharedOrder). `name`: of the loader, for
    errors. A loader with torch's DistributedSampler is already sharded and is returned unchanged.
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
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    order = SharedOrder(sampler, agree, each_pass, name)
    if loader.batch_sampler is None:
        share = OrderShard(_Passes(loader.sampler, order), index, num)
        return DataLoader(loader.dataset, batch_size=None, sampler=share, **_options(loader))
    batches = BatchShard(loader.batch_sampler, index, num, order)
    return DataLoader(loader.dataset, batch_sampler=batches, **_options(loader))


class BatchShard(Sampler[list[Any]]):
    """Yields the batch at position `index` of every `num` consecutive batches.

    If the last round has fewer than `num` batches, or its last batch is not full, its samples are dealt out anew: every
    worker gets one batch, and the sizes of these batches differ by at most one. If fewer samples than workers remain,
    some samples are used twice. With drop_last, such a round is dropped.
    """

    def __init__(self, batches: Any, index: int, num: int, order: SharedOrder) -> None:
        self._batches, self._index, self._num, self._order = batches, index, num, order
        self._drops = bool(getattr(batches, "drop_last", False))
        # a sampler of the user's may have batches of any size, which stay as they are
        self._size: int = batches.batch_size if type(batches) is BatchSampler else 0

    def __iter__(self) -> Iterator[list[Any]]:
        for taken in _rounds(self._order.begin(self._batches), self._num):
            if len(taken) == self._num and len(taken[-1]) >= self._size:
                yield taken[self._index]
            elif not self._drops:
                yield self._share([sample for batch in taken for sample in batch])

    def _share(self, samples: list[Any]) -> list[Any]:
        samples = [samples[i % len(samples)] for i in range(max(len(samples), self._num))]
        start, stop = (place * len(samples) // self._num for place in (self._index, self._index + 1))
        return samples[start:stop]

    def __len__(self) -> int:
        return (len(self._batches) + (0 if self._drops else self._num - 1)) // self._num


class _Passes:
    """A sampler whose passes have a shared order."""

    def __init__(self, sampler: Any, order: SharedOrder) -> None:
        self._sampler, self._order = sampler, order

    def __iter__(self) -> Iterator[Any]:
        return self._order.begin(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


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


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    more = ("generator", "prefetch_factor", "persistent_workers", "pin_memory_device")
    return {name: getattr(loader, name) for name in (*names, *more)}
