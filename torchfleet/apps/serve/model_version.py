"""The protocols of a served model: its versions, each with rows and the network's parameters, and their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.serving.description import ServingDescription


class ModelVersion(Protocol):
    """One version of a model. It does not change: a batch that has begun with it ends with it."""

    number: int  # grows by one with every version that is taken over
    created: float  # time.time() of the newest training step in it

    @property
    def described(self) -> ServingDescription:
        """Features and graph, of the same save as the rest. Raises CheckpointError if that save has none."""
        ...

    @property
    def tables(self) -> Mapping[str, int]:
        """The tables with rows, and how many numbers a row has."""
        ...

    def rows(self, table: str, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The rows of `keys`, [len(keys), dim]. Keys may repeat; an id without a row reads as zeros."""
        ...

    def known_rows(
        self, table: str, keys: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """(rows as `rows` returns them, mask of the keys that have one)."""
        ...

    def dim(self, table: str) -> int:
        """How many numbers a row of `table` has."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers of the network, by the names of its state_dict."""
        ...


class ModelSource(Protocol):
    """Where versions come from."""

    def current(self) -> ModelVersion:
        """The newest version. Never blocks; the same object until the next version is taken over."""
        ...

    def tell(self, take: Callable[[Any], None]) -> None:
        """Call `take` with the current version now, and with every later one, in a thread of the source, before it
        becomes current. A version at which it raises an error does not become current.
        """
        ...

    def close(self) -> None:
        """Release files, memory and threads. Versions that were returned before must not be used any more."""
        ...
