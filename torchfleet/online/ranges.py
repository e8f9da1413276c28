"""Ranges of offsets: what of a topic makes a part, and which worker takes what of it."""

from __future__ import annotations

import msgspec


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Offsets from `start` up to, not including, `stop`. Not every offset need hold a message."""

    partition: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def cut(available: list[Range], num: int) -> list[Range]:
    """The first `num` offsets, from all partitions in proportion to what they have, so that none falls behind."""
    total = sum(map(len, available))
    if num >= total:
        return [part for part in available if len(part)]
    taken = [len(part) * num // total for part in available]
    rests = [len(part) * num % total for part in available]
    for i in sorted(range(len(rests)), key=lambda i: -rests[i])[: num - sum(taken)]:
        taken[i] += 1
    cuts = [Range(part.partition, part.start, part.start + size) for part, size in zip(available, taken, strict=True)]
    return [part for part in cuts if len(part)]


def share(ranges: list[Range], worker: int, num_workers: int) -> list[Range]:
    """A worker's stretch of all the ranges laid end to end: sizes differ by at most one, most partitions stay whole."""
    total = sum(map(len, ranges))
    first, last = total * worker // num_workers, total * (worker + 1) // num_workers
    own, begin = [], 0
    for part in ranges:
        start, stop = max(first, begin), min(last, begin + len(part))
        if start < stop:
            own.append(Range(part.partition, part.start + start - begin, part.start + stop - begin))
        begin += len(part)
    return own
