"""Uneven machines: batches whose sizes follow the measured speeds of the workers, so that all end a round together.

    share of worker i  =  n · B · vᵢ / Σ v        n workers, B samples in a batch of the loader, v samples per second

The global batch n·B stays as the user set it, and the mean over a round is by samples, so that learning rates stay as
they are. Every worker computes all shares, from what all workers reported in earlier rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torchfleet.api.hybrid.server_rounds import Told
from torchfleet.base.errors import DataError
from torchfleet.data.file_passes import END, HELD, is_batch, look_ahead
from torchfleet.data.slots import Batch, Ragged

_KEPT = 0.8  # weight of the measurements before the last one
_LEAST = 1  # samples of a batch, at least


class Shares:
    """This worker's share of the global batch."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._speeds: dict[int, float] = {}
        self.usual = 0  # samples of a batch of this worker's loader

    def note(self, told: Mapping[int, Told]) -> None:
        """Use what the workers reported in a round. Forgets workers that were not in it."""
        speeds = {}
        for worker, own in told.items():
            if own.samples and own.seconds > 0:
                now, before = own.samples / own.seconds, self._speeds.get(worker)
                speeds[worker] = now if before is None else _KEPT * before + (1 - _KEPT) * now
        self._speeds = speeds

    def next_size(self) -> int:
        """How many samples this worker's next batch has."""
        own = self._speeds.get(self._worker)
        if own is None:
            return self.usual
        return max(_LEAST, round(len(self._speeds) * self.usual * own / sum(self._speeds.values())))

    def row_share(self, told: Mapping[int, Told]) -> float:
        """The factor for gradients of rows. With it, every sample counts alike, whatever the size of its batch."""
        own = told.get(self._worker)
        return own.samples / self.usual if own is not None and own.samples and self.usual else 1.0


class Recut:
    """The samples of a loader in batches of `shares.next_size()` samples. The last batch has the rest, and so has one
    after which samples come only when other workers are done with their files."""

    def __init__(self, loader: Iterable[Any], shares: Shares) -> None:
        self._source, self._shares = iter(loader), shares
        self._waiting: list[Any] = []  # batches, and parts of them
        self._num = 0  # samples in them
        self._num_taken = 0  # batches of the loader
        self._used_up = deque([0])  # how many of the loader's: before the batches that are in use, and after each
        self._is_over = False

    def __iter__(self) -> Recut:
        return self

    def __next__(self) -> Any:
        """The next batch. All batches before it have been used."""
        while (found := self.look_ahead(0)) is HELD:
            self._add(next(self._source, END))
        if found is END:
            raise StopIteration
        return found

    def look_ahead(self, num_kept: int) -> Any:
        """The next batch, END or HELD. The last `num_kept` batches before it stay in use."""
        while len(self._used_up) > num_kept + 1:
            self._used_up.popleft()
        while not self._num or self._num < self._shares.next_size():
            found = END if self._is_over else look_ahead(self._source, self._num_taken - self._used_up[0])
            if found is END:
                self._is_over = True
            if is_batch(found):
                self._add(found)
            elif self._num:
                return self._cut(self._num)
            else:
                return found
        return self._cut(self._shares.next_size())

    def _add(self, batch: Any) -> None:
        if batch is END:
            self._is_over = True
            return
        size = num_samples_of(batch)
        self._shares.usual = self._shares.usual or size
        self._waiting.append(batch)
        self._num += size
        self._num_taken += 1

    def _cut(self, num: int) -> Any:
        whole = joined(self._waiting)
        batch = whole if num == self._num else part_of(whole, 0, num)
        self._waiting = [part_of(whole, num, self._num)] if num < self._num else []
        self._num -= num
        self._used_up.append(self._num_taken - len(self._waiting))
        return batch


def num_samples_of(batch: Any) -> int:
    """The number of samples: the common length of all tensors. Raises DataError if the batch cannot be cut."""
    sizes = set(_sizes(batch))
    if len(sizes) != 1 or not min(sizes):
        raise DataError(
            f"a_sync_configs['balance']=True cuts batches, and cannot cut this one: its tensors have lengths "
            f"{sorted(sizes)}. Give batches whose tensors all have the samples as their first dimension, or leave "
            "balance out."
        )
    return sizes.pop()


def part_of(batch: Any, start: int, stop: int) -> Any:
    """The samples from `start` to `stop` of a batch, in the same memory."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop]
    if isinstance(batch, Ragged):
        bounds = [int(offset) for offset in batch.offsets[start : stop + 1][[0, -1]]]
        end = len(batch.values) if stop >= batch.num_samples else bounds[1]
        return Ragged(batch.values[bounds[0] : end], batch.offsets[start:stop] - bounds[0])
    if isinstance(batch, Batch):
        return Batch({name: part_of(value, start, stop) for name, value in batch.items()}, stop - start)
    if isinstance(batch, dict):
        return {name: part_of(value, start, stop) for name, value in batch.items()}
    return _like(batch, [part_of(value, start, stop) for value in batch])


def joined(batches: list[Any]) -> Any:
    """Several batches as one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, Ragged):
        return _joined_ragged(batches)
    if isinstance(first, Batch):
        parts = {name: joined([batch[name] for batch in batches]) for name in first}
        return Batch(parts, sum(batch.num_samples for batch in batches))
    if isinstance(first, dict):
        return {name: joined([batch[name] for batch in batches]) for name in first}
    return _like(first, [joined(list(values)) for values in zip(*batches, strict=True)])


def _like(batch: Any, values: list[Any]) -> Any:
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _joined_ragged(batches: list[Ragged]) -> Ragged:
    firsts = [0]
    for batch in batches[:-1]:
        firsts.append(firsts[-1] + len(batch.values))
    offsets = [batch.offsets + first for batch, first in zip(batches, firsts, strict=True)]
    return Ragged(torch.cat([batch.values for batch in batches]), torch.cat(offsets))


def _sizes(batch: Any) -> Iterator[int]:
    """The number of samples in each tensor of a batch."""
    if isinstance(batch, torch.Tensor):
        yield len(batch) if batch.dim() else 0
    elif isinstance(batch, Ragged):
        yield batch.num_samples
    elif isinstance(batch, (dict, Batch, list, tuple)):
        for value in batch.values() if isinstance(batch, (dict, Batch)) else batch:
            yield from _sizes(value)
    else:
        raise DataError(
            f"a_sync_configs['balance']=True cuts batches, and cannot cut a {type(batch).__name__}. Give batches of a "
            "fleet dataset, or of tensors (also in tuples, lists and dicts), or leave balance out."
        )
