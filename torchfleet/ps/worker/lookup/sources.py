"""What the lookup engine needs from outside: embeddings and a source of rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.client.future import Pulled
from torchfleet.ps.worker.client.shard import Keys


class Embedding(Protocol):
    """A layer that looks rows up."""

    dim: int
    num_embeddings: int | None  # ids are 0..num_embeddings-1; None: any 64-bit id
    padding_idx: int | None  # reads as zeros and has no row
    path: str  # in its model; empty if it is the model
    training: bool

    @property
    def weight(self) -> torch.Tensor:
        """Empty; ties its lookups into the graph."""
        ...


class PullAhead(Protocol):
    """A pull in flight."""

    def result(self) -> Pulled: ...


@dataclass(slots=True)
class TimedPull:
    """A pull whose waiting time is added to `seconds["pull"]`."""

    _pull: PullAhead
    _seconds: dict[str, float]

    def result(self) -> Pulled:
        start = time.perf_counter()
        pulled = self._pull.result()
        self._seconds["pull"] += time.perf_counter() - start
        return pulled


class Source(Protocol):
    """Where rows come from: the communicator of the mode, or the tables of a saved model."""

    pulls_ahead: bool  # rows may be requested before the previous step has ended

    def pull(self, keys: Mapping[str, Keys], create: bool) -> PullAhead: ...


class NoRows:
    """The source of a worker that has left its servers: every lookup raises an error that says so."""

    pulls_ahead = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def pull(self, keys: Mapping[str, Keys], create: bool) -> PullAhead:
        raise FleetError(self._reason)
