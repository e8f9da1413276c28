"""One random order for all workers: the order that plain torch would draw on worker 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from torchfleet.base.prepared_types import prepared

Item = TypeVar("Item")
Agree = Callable[[str, bytes], bytes]  # (name of the meeting, own bytes): the bytes of worker 0, on all workers


class SharedOrder:
    """The order of a sampler, the same on all workers in every pass.

    torch's samplers without a generator draw from torch's global random state when a pass begins. With `each_pass`, all
    workers meet at that moment and use worker 0's state, which goes on as in plain torch. Without `each_pass`, all
    workers go on from worker 0's state at the creation of this object, and no worker waits for another. A sampler with
    a generator gets the state of worker 0's generator at creation. A sampler that draws from neither must yield the
    same order on all workers.

    `draws_anywhere`: the order is drawn by code of the user's when a pass begins, also from the global states of numpy
    and of Python's random, which are worker 0's at that moment, too.
    """

    def __init__(self, sampler: Any, agree: Agree, each_pass: bool, name: str, draws_anywhere: bool = False) -> None:
        self._agree, self._name, self._num_passes = agree, name, 0
        self._states = AllStates() if draws_anywhere else _TorchState()
        self._draws_globally = draws_anywhere or getattr(sampler, "generator", self) is None
        self.state: bytes | None = None  # random state of the next pass, if workers do not meet for it
        self.generator: torch.Generator | None = getattr(sampler, "generator", None)  # of the sampler
        if getattr(sampler, "generator", None) is not None:
            told = self._of_worker_0(sampler.generator.get_state().numpy().tobytes())
            sampler.generator.set_state(_as_tensor(told))
        if self._draws_globally and not each_pass:
            self.state = self._of_worker_0(self._states.get())

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
        own, kept = self._states.get(), self.state
        state = self._of_worker_0(own) if kept is None else kept
        if kept is None and state == own:  # worker 0, and workers with its seed: as in plain torch
            yield
            return
        self._states.set(state)
        try:
            yield
        finally:
            self.state = None if kept is None else self._states.get()
            self._states.set(own)

    def _of_worker_0(self, state: bytes) -> bytes:
        return self._agree(f"{self._name}, pass {self._num_passes}", state)


class _TorchState:
    """torch's global random state, as bytes."""

    def get(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()

    def set(self, state: bytes) -> None:
        torch.set_rng_state(_as_tensor(state))


class _States(msgspec.Struct):
    of_torch: bytes
    of_numpy: tuple[str, tuple[int, ...], int, int, float]  # kind, keys, position, whether a normal number is left, it
    of_python: tuple[int, tuple[int, ...], float | None]  # version, numbers, a normal number that is left


class AllStates(_TorchState):
    """The global random states of torch, of numpy and of Python."""

    def get(self) -> bytes:
        of_numpy: Any = np.random.get_state()
        kind, keys, *rest = of_numpy
        return msgspec.msgpack.encode(_States(super().get(), (kind, keys.tolist(), *rest), random.getstate()))

    def set(self, state: bytes) -> None:
        found = msgspec.msgpack.decode(state, type=prepared(_States))
        super().set(found.of_torch)
        of_numpy: Any = found.of_numpy
        np.random.set_state(of_numpy)
        random.setstate(found.of_python)


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
