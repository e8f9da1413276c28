"""Separate random numbers for each of the ranks that share layers.

    with fleet.nn.parallel_random():
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)  # on this rank's own heads
    self.dropout = fleet.nn.ParallelDropout(0.1)                           # behind a column-parallel layer

Ranks along the model axis have equal random states, so that dropout of a replicated tensor uses the same mask on all of
them. A sharded tensor needs different masks, as a single process would draw different ones for different heads. Inside
the context the random state is seeded with (a number drawn from the CPU's state, the rank's index on the axis);
afterwards the previous state is restored. So there is no state besides torch's own: recompute restores that and gets
the same masks again.

Source: Shoeybi et al. 2019, Megatron-LM, which keeps a second state instead. Without tensor_parallel this does nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from torchfleet.base.errors import ModelError
from torchfleet.collective.world import Place, begun


def parallel_random() -> contextlib.AbstractContextManager[None]:
    """Inside this context, random numbers on the rank's device differ among the ranks that share layers."""
    return contextlib.nullcontext() if begun.place is None else _at(begun.place)


@contextlib.contextmanager
def _at(place: Place) -> Iterator[None]:
    drawn = torch.randint(1 << 62, (), device="cpu")
    if isinstance(drawn, FakeTensor):
        raise ModelError(
            "fleet.nn.parallel_random() in a model that a pipeline traces: its random numbers would be those of all "
            "ranks. Use the layers fleet.nn.ParallelDropout or fleet.nn.ParallelRandom, or make the model a Sequential."
        )
    generator = _generator(place.device)
    state = generator.get_state()
    generator.manual_seed(seed_of(int(drawn), place.rank))
    try:
        yield
    finally:
        generator.set_state(state)


class CutRandom:
    """Keeps parallel_random() open from a layer that shards its outputs to the layer that sums them, within one call.

    Functions between the two, such as dropout inside attention, then draw different numbers on each rank.
    """

    def __init__(self) -> None:
        self._open: contextlib.AbstractContextManager[None] | None = None

    def enter(self) -> None:
        if self._open is None:
            self._open = parallel_random()
            self._open.__enter__()

    def leave(self) -> None:
        """Restore the random state. Does nothing if `enter` was not called before."""
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__(None, None, None)


class ParallelRandom(torch.nn.Module):
    """Calls `inner` with tensors under parallel_random(). A pipeline that traces the model does not trace into it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: torch.Tensor) -> Any:
        if not self.training:
            return self.inner(*tensors)
        with parallel_random():
            return self.inner(*tensors)

    def stand_in(self) -> torch.nn.Module | None:
        """A replacement for tracing, which cannot see random states; None if no layers are shared."""
        return None if begun.place is None else _Told(self.inner)


class _Told(torch.nn.Module):
    """Copies its inputs in order, so that the trace shows their order."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.inner(*[tensor.clone() for tensor in tensors])


class ParallelDropout(torch.nn.Dropout):
    """torch.nn.Dropout for tensors sharded over the ranks of the model axis: each rank draws its own mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        with parallel_random():
            return F.dropout(x, self.p, True, self.inplace)

    def stand_in(self) -> torch.nn.Module | None:
        """A replacement for tracing, which cannot see random states; None if no layers are shared."""
        return None if begun.place is None else torch.nn.Dropout(self.p, self.inplace)


def seed_of(drawn: int, rank: int) -> int:
    """A hashed seed, so that the seeds of neighbouring ranks are unrelated."""
    digest = hashlib.blake2b(f"{drawn} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
