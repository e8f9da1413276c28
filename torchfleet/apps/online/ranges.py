"""Ranges of offsets of a topic: cut into parts, and shared among workers."""

from __future__ import annotations

import msgspec


class OffsetRange(msgspec.Struct, frozen=True, array_like=True):
    """Offsets from `start` up to, not including, `stop`. Not every offset need hold a message."""

    partition: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def cut(available: list[OffsetRange], num: int) -> list[OffsetRange]:
    """The first `num` offsets, from each partition in proportion to its available ones: no partition falls behind."""
    total = sum(map(len, available))
    if num >= total:
        return [offsets for offsets in available if len(offsets)]
    taken = [len(offsets) * num // total for offsets in available]
    rests = [len(offsets) * num % total for offsets in available]
    for i in sorted(range(len(rests)), key=lambda i: -rests[i])[: num - sum(taken)]:
        taken[i] += 1
    cuts = [
        OffsetRange(offsets.partition, offsets.start, offsets.start + size)
        for offsets, size in zip(available, taken, strict=True)
    ]
    return [offsets for offsets in cuts if len(offsets)]


def share(ranges: list[OffsetRange], worker: int, num_workers: int) -> list[OffsetRange]:
    """A worker's share of all ranges: concatenated, they are cut into equal lengths, so most partitions stay whole."""
    total = sum(map(len, ranges))
    first, last = total * worker // num_workers, total * (worker + 1) // num_workers
    own, begin = [], 0
    for offsets in ranges:
        start, stop = max(first, begin), min(last, begin + len(offsets))
        if start < stop:
            own.append(OffsetRange(offsets.partition, offsets.start + start - begin, offsets.start + stop - begin))
        begin += len(offsets)
    return own
