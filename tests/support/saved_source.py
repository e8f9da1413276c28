"""A saved model in the memory of this process, as a source of one version: the oracle of what serving maps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.infer import load_rows, load_tensors
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.tables.sparse_table import SparseTable


class SavedVersion:
    """A version whose tables and parameters are in this process."""

    def __init__(
        self, number: int, created: float, tables: Mapping[str, SparseTable], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self.number, self.created = number, created
        self._tables, self._tensors = tables, tensors

    def rows(self, table: str, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self._table(table).look_up(keys.view(np.uint64), create=False)

    def known_rows(
        self, table: str, keys: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        rows = self.rows(table, keys)
        return rows, np.asarray(rows.any(axis=1))

    def dim(self, table: str) -> int:
        return self._table(table).spec.dim

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def _table(self, name: str) -> SparseTable:
        if name not in self._tables:
            raise CheckpointError(f"this model has no table '{name}'; it has {', '.join(self._tables) or 'none'}")
        return self._tables[name]


class SavedModel:
    """The model of a folder as it is now: one version, loaded once."""

    def __init__(self, folder: str) -> None:
        storage = Storage(folder)
        manifest = read_manifest(storage)
        tables = {
            table.name: load_rows(storage, manifest, table.name, table.dim, table.size)
            for table in manifest.tables
            if not table.is_dense
        }
        tensors = load_tensors(storage, manifest)
        self._version = SavedVersion(manifest.number, manifest.time, tables, tensors)

    def current(self) -> SavedVersion:
        return self._version

    def close(self) -> None:
        pass
