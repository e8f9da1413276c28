"""Uneven data: the ranks agree, one batch ahead and during training, whether all of them have another batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from torchfleet.base.errors import FleetError

_END: Any = object()


class Agreement:
    """Exchanges which ranks have batches left.

    It has its own process group, because gradients of other batches are exchanged at the same time."""

    def __init__(self, rank: int, size: int, backend: str | None, noun: str = "rank") -> None:
        """All ranks call it together. `backend`: None for the default group's. `noun`: what errors call a rank."""
        self._rank, self._size, self._noun = rank, size, noun
        self._group = dist.new_group(backend=backend)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, as long as every rank has one. All ranks iterate together.

        The question about a batch is sent when the previous batch is returned, and its answer is awaited when the batch
        is requested: with a consumer that reads one batch ahead, a whole step lies in between.
        """
        numbers = self._numbers(exact_length(loader))
        if min(numbers) >= 0:
            yield from self._counted(loader, numbers)
            return
        source = iter(loader)
        ahead = self._ask(next(source, _END))
        num_read = 0
        while True:
            asked = ahead
            ahead = self._ask(_END if asked.batch is _END else next(source, _END))
            ended = asked.ended()
            if ended:
                break
            yield asked.take()
            num_read += 1
        ahead.ended()  # all ranks have asked: nothing is in flight when the next loop begins
        if asked.batch is not _END:
            self._tell(loader, num_read, ended, 1 + (ahead.batch is not _END))

    def _numbers(self, own: int | None) -> list[int]:
        """By rank: how many batches it has; -1 if it does not know."""
        numbers = torch.zeros(self._size, dtype=torch.int64)
        numbers[self._rank] = -1 if own is None else own
        dist.all_reduce(numbers, group=self._group)
        found: list[int] = numbers.tolist()
        return found

    def _counted(self, loader: Iterable[Any], numbers: list[int]) -> Iterator[Any]:
        """`batches` if every rank knows how many it has: there is no further exchange."""
        least, own = min(numbers), numbers[self._rank]
        num_read = 0
        for batch in itertools.islice(loader, least):
            yield batch
            num_read += 1
        if num_read < least:
            raise FleetError(
                f"{self._noun} {self._rank}: its loader ended after {num_read} batches, and has a length of {own}: the "
                f"other {self._noun}s wait for the rest"
            )
        if own > least:
            self._tell(loader, num_read, [rank for rank, number in enumerate(numbers) if number == least], 1)

    def _ask(self, batch: Any) -> Asked:
        flags = torch.zeros(self._size, dtype=torch.uint8)
        flags[self._rank] = batch is _END
        return Asked(batch, flags, dist.all_reduce(flags, group=self._group, async_op=True))

    def _tell(self, loader: Iterable[Any], num_read: int, ended: list[int], at_least: int) -> None:
        try:
            left = f"{len(loader) - num_read} batches are"  # type: ignore[arg-type]
        except TypeError:  # a dataset or a generator, whose length is unknown
            left = f"at least {at_least} more batch{'es are' if at_least > 1 else ' is'}"
        noun, who = self._noun, ", ".join(map(str, ended))
        print(
            f"fleet.prefetch: {noun} {self._rank} stops after {num_read} batches, because {noun} {who} has no more; "
            f"{left} left unused",
            flush=True,
        )


def exact_length(loader: Any) -> int | None:
    """The number of batches, if the loader is sure to yield as many; None for others, such as a stream that estimates
    its length, or a sampler of the user's.
    """
    if isinstance(loader, (list, tuple)):
        return len(loader)
    is_plain = type(loader) is DataLoader and type(getattr(loader, "batch_sampler", None)) is BatchSampler
    if is_plain and type(loader.sampler) in (SequentialSampler, RandomSampler, DistributedSampler):
        return len(loader)
    return None


class Asked:
    """A batch, or the end of the batches, and the exchange that asks all ranks whether they have one."""

    def __init__(self, batch: Any, flags: torch.Tensor, work: Any) -> None:
        self.batch, self._flags, self._work = batch, flags, work

    def ended(self) -> list[int]:
        """The ranks that have no such batch. Waits until the slowest rank has read this far."""
        if self._work is not None:
            self._work.wait()
        return [int(rank) for rank in torch.nonzero(self._flags)]

    def take(self) -> Any:
        batch, self.batch = self.batch, None
        return batch
