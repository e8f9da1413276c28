"""One random order for all workers: the order that plain torch would draw on worker 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Agree = Callable[[str, bytes], bytes]  # (name of the meeting, own bytes): the bytes of worker 0, on all workers


class SharedOrder:
    """The order of a sampler, the same on all workers in every pass.

    torch's samplers without a generator draw from torch's global random state when a pass begins. With `each_pass`, all
    workers meet at that moment and use worker 0's state, which goes on as in plain torch. Without `each_pass`, all
    workers go on from worker 0's state at the creation of this object, and no worker waits for another. A sampler with
    a generator gets the state of worker 0's generator at creation. A sampler that draws from neither must yield the
    same order on all workers.
    """

    def __init__(self, sampler: Any, agree: Agree, each_pass: bool, name: str) -> None:
        self._agree, self._name, self._num_passes = agree, name, 0
        self._draws_globally = getattr(sampler, "generator", self) is None
        self._state: torch.Tensor | None = None  # random state of the next pass, if workers do not meet for it
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.set_state(self._of_worker_0(sampler.generator.get_state()))
        elif self._draws_globally and not each_pass:
            self._state = self._of_worker_0(torch.get_rng_state())

    def begin(self, items: Iterable[Item]) -> Iterator[Item]:
        """Begin a pass over `items`: the sampler of this order, or batches from it."""
        drawn = iter(items)
        if not self._draws_globally:
            return drawn
        with self._random_numbers():
            first = list(islice(drawn, 1))
        return chain(first, drawn)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Within this context, torch's global random state is that of the pass."""
        self._num_passes += 1
        own, kept = torch.get_rng_state(), self._state
        state = self._of_worker_0(own) if kept is None else kept
        if kept is None and torch.equal(state, own):  # worker 0, and workers with its seed: as in plain torch
            yield
            return
        torch.set_rng_state(state)
        try:
            yield
        finally:
            self._state = None if kept is None else torch.get_rng_state()
            torch.set_rng_state(own)

    def _of_worker_0(self, state: torch.Tensor) -> torch.Tensor:
        told = self._agree(f"{self._name}, pass {self._num_passes}", state.numpy().tobytes())
        return torch.frombuffer(bytearray(told), dtype=torch.uint8)
