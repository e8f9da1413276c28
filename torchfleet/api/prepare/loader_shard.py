"""Shards a torch DataLoader over workers: every worker draws the same order and takes its share of each round."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from torchfleet.api.prepare.shared_order import Agree, SharedOrder

Item = TypeVar("Item")


def shared_loader(
    loader: DataLoader[Any], index: int, num: int, agree: Agree, each_pass: bool = True, name: str = "a loader"
) -> DataLoader[Any] | BatchesOfEvery:
    """The loader of worker `index` of `num`, of the same class, with the same batch size, order, collate function and
    worker processes; its `batch_sampler`, `sampler` or `dataset` gives this worker's share. Of a class with its own
    `__iter__` or `__len__`, an iterable over whole batches of the loader.

    `agree` returns the bytes of worker 0, and all workers must call this together. `each_pass`: whether workers meet at
    the beginning of every pass, to use worker 0's random state at that moment (SharedOrder). `name`: of the loader, for
    errors. A loader with torch's DistributedSampler is already sharded and is returned unchanged.
    """
    if num == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if iterates_by_itself(loader):
        order = SharedOrder(sampler, agree, each_pass, name, draws_anywhere=True)
        return BatchesOfEvery(loader, index, num, order)
    if isinstance(loader.dataset, IterableDataset):
        return _with(loader, dataset=SampleShard(loader.dataset, index, num))
    order = SharedOrder(sampler, agree, each_pass, name)
    if loader.batch_sampler is None:
        return _with(loader, sampler=OrderShard(_Passes(loader.sampler, order), index, num))
    return _with(loader, batch_sampler=BatchShard(loader.batch_sampler, index, num, order))


def iterates_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class decides itself which batches it has, so that its samplers may say nothing of them."""
    kind = type(loader)
    return any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "__len__"))


def order_of(loader: Any) -> SharedOrder | None:
    """The common order of what `shared_loader` has made; None if the workers have none."""
    if isinstance(loader, BatchesOfEvery):
        return loader.order
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else getattr(loader.sampler, "items", None)
    return getattr(sampler, "order", None)


class BatchShard(Sampler[list[Any]]):
    """Yields the batch at position `index` of every `num` consecutive batches.

    If the last round has fewer than `num` batches, or its last batch is not full, its samples are dealt out anew: every
    worker gets one batch, and the sizes of these batches differ by at most one. If fewer samples than workers remain,
    some samples are used twice. With drop_last, such a round is dropped.
    """

    def __init__(self, batches: Any, index: int, num: int, order: SharedOrder) -> None:
        self._batches, self._index, self._num, self.order = batches, index, num, order
        self._drops = bool(getattr(batches, "drop_last", False))
        # a sampler of the user's may have batches of any size, which stay as they are
        self._size: int = batches.batch_size if type(batches) is BatchSampler else 0

    def __iter__(self) -> Iterator[list[Any]]:
        for taken in _rounds(self.order.begin(self._batches), self._num):
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
        self._sampler, self.order = sampler, order

    def __iter__(self) -> Iterator[Any]:
        return self.order.begin(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class _OneOfEvery:
    """Yields the item at position `index` of every `num` consecutive items, the same number for every worker.

    If the last round is short, some of its items are used twice.
    """

    def __init__(self, items: Any, index: int, num: int) -> None:
        self.items, self._index, self._num = items, index, num

    def __iter__(self) -> Iterator[Any]:
        for taken in _rounds(self.items, self._num):
            yield taken[self._index % len(taken)]

    def __len__(self) -> int:
        return (len(self.items) + self._num - 1) // self._num


class OrderShard(_OneOfEvery, Sampler[Any]):
    """A worker's share of a sampler."""


class SampleShard(_OneOfEvery, IterableDataset[Any]):
    """A worker's share of a stream of samples."""


class BatchesOfEvery:
    """A worker's share of the batches of a loader whose class has its own `__iter__` or `__len__`.

    Every worker reads all batches, and takes the one at position `index` of every `num` consecutive ones. The last
    round, if it is short, is as in _OneOfEvery; with drop_last it is dropped.
    """

    def __init__(self, loader: DataLoader[Any], index: int, num: int, order: SharedOrder) -> None:
        self._loader, self.order = loader, order
        self._index, self._num, self._drops = index, num, loader.drop_last

    def __iter__(self) -> Iterator[Any]:
        for taken in _rounds(self.order.begin(self._loader), self._num):
            if len(taken) == self._num or not self._drops:
                yield taken[self._index % len(taken)]

    def __len__(self) -> int:
        return (len(self._loader) + (0 if self._drops else self._num - 1)) // self._num


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


def _with(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """A loader of the same class and with the same attributes, but for these. Its own methods among them, such as a
    collate function, are those of the new loader.
    """
    made: DataLoader[Any] = object.__new__(type(loader))
    for name, value in {**vars(loader), "_iterator": None, **parts}.items():
        is_own = isinstance(value, types.MethodType) and value.__self__ is loader
        vars(made)[name] = types.MethodType(value.__func__, made) if is_own else value
    return made
