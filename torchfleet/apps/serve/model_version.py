"""The protocols of a served model: its versions, each with rows and the network's parameters, and their source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class ModelVersion(Protocol):
    """One version of a model. It does not change: a batch that has begun with it ends with it."""

    number: int  # grows by one with every version that is taken over
    created: float  # time.time() of the newest training step in it

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

    def close(self) -> None:
        """Release files, memory and threads. Versions that were returned before must not be used any more."""
        ...
