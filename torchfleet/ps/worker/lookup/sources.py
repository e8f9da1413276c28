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

    def pull(self, keys: Mapping[str, Keys], create: bool, foreseen: bool = False) -> PullAhead:
        """Request rows of several tables. `create`: for training. `foreseen`: these ids may not be looked up after all:
        missing ones read their first values, and get no rows until they are pushed, or given to `create_rows`.
        """
        ...

    def create_rows(self, keys: Mapping[str, Keys]) -> None:
        """Create the rows of ids that were foreseen, were looked up for training, and get no gradient."""
        ...

    def without_row(self, keys: Mapping[str, Keys]) -> Mapping[str, Keys]:
        """Those of these ids, which a prediction read as zeros, that have no row, and first values other than zeros."""
        ...


class ForPrediction:
    """What a source of rows for prediction alone has of a Source: no step takes gradients of its rows."""

    pulls_ahead = False

    def create_rows(self, keys: Mapping[str, Keys]) -> None:
        raise FleetError("these rows are for prediction: they cannot be trained")

    def without_row(self, keys: Mapping[str, Keys]) -> Mapping[str, Keys]:
        raise FleetError("these rows are for prediction: they cannot be trained")


class NoRows:
    """The source of a worker that has left its servers: every lookup raises an error that says so."""

    pulls_ahead = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def pull(self, keys: Mapping[str, Keys], create: bool, foreseen: bool = False) -> PullAhead:
        raise FleetError(self._reason)

    def create_rows(self, keys: Mapping[str, Keys]) -> None:
        raise FleetError(self._reason)

    def without_row(self, keys: Mapping[str, Keys]) -> Mapping[str, Keys]:
        raise FleetError(self._reason)
