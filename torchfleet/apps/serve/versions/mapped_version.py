"""A version of a model, read from files that several processes share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.serving.description import ServingDescription, decoded_description, not_there
from torchfleet.apps.serve.versions.level_file import ALIVE, MappedLevel, TableMap, open_own, read_rows, rows_of
from torchfleet.apps.serve.versions.version_description import DescribedModel, Description, Network
from torchfleet.base.errors import CheckpointError
from torchfleet.ps.checkpoint.manifest_parts import Parameter
from torchfleet.ps.checkpoint.save_files import SERVING
from torchfleet.ps.tables.settings.spec import Floats
from torchfleet.ps.worker.lookup.dense_group import write_words


class _MappedModel:
    """The serving.json of a version, which is decoded when it is first asked for."""

    def __init__(self, folder: Path, model: DescribedModel | None) -> None:
        self.model = model
        self._described: ServingDescription | None = None
        self._body = b""
        if model is not None:
            with open_own(folder, model.file) as file:
                self._body = file.read()

    def described(self) -> ServingDescription:
        if self._described is None:
            if self.model is None:
                raise CheckpointError(not_there(SERVING))
            self._described = decoded_description(self._body, SERVING)
        return self._described


class MappedVersion:
    """A ModelVersion over files of `folder`. Levels that `before` has mapped are not mapped again."""

    def __init__(self, folder: Path, description: Description, before: MappedVersion | None = None) -> None:
        """Raises FileNotFoundError if the version was replaced and removed meanwhile."""
        self.description, self.number, self.created = description, description.number, description.created
        known = {} if before is None else before.levels
        self.levels: dict[str, MappedLevel] = {
            level.file: known[level.file] if level.file in known else MappedLevel(folder, level)
            for level in description.levels
        }
        stack = [self.levels[level.file] for level in description.levels]
        self._maps: dict[str, list[TableMap]] = {
            name: [mapped.tables[name] for mapped in stack if name in mapped.tables] for name in description.tables
        }
        self._parameters = _parameters(folder, description.network)
        is_same = before is not None and before.description.model == description.model
        self._model: _MappedModel = (
            before._model if before is not None and is_same else _MappedModel(folder, description.model)
        )

    @property
    def described(self) -> ServingDescription:
        """As ModelVersion.described."""
        return self._model.described()

    @property
    def tables(self) -> Mapping[str, int]:
        """As ModelVersion.tables."""
        return self.description.tables

    def rows(self, table: str, keys: npt.NDArray[np.int64]) -> Floats:
        """As ModelVersion.rows."""
        return rows_of(self._maps_of(table), self.description.tables[table], keys)

    def known_rows(self, table: str, keys: npt.NDArray[np.int64]) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """As ModelVersion.known_rows."""
        rows, found = self.changed_rows(table, keys)
        return rows, found == ALIVE

    def changed_rows(self, table: str, keys: npt.NDArray[np.int64]) -> tuple[Floats, npt.NDArray[np.uint8]]:
        """As level_file.read_rows: for a version that holds the changes since a save."""
        return read_rows(self._maps_of(table), self.description.tables[table], keys)

    def dim(self, table: str) -> int:
        """As ModelVersion.dim."""
        self._maps_of(table)
        return self.description.tables[table]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """As ModelVersion.parameters."""
        return self._parameters

    def _maps_of(self, table: str) -> list[TableMap]:
        if table not in self._maps:
            names = ", ".join(self._maps) or "none"
            raise CheckpointError(f"this model has no table '{table}'; it has {names}")
        return self._maps[table]


def _parameters(folder: Path, network: Network) -> dict[str, torch.Tensor]:
    if not network.size:
        return {}
    with open_own(folder, network.file) as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    values: Floats = np.frombuffer(memory, np.float32, network.size)
    return {
        parameter.name: _tensor(parameter, values[parameter.start : parameter.start + parameter.size])
        for parameter in network.parameters
    }


def _tensor(parameter: Parameter, values: Floats) -> torch.Tensor:
    if parameter.dtype == "float32":
        return torch.from_numpy(values).view(parameter.shape)
    dtype: Any = getattr(torch, parameter.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"parameter '{parameter.name}' was saved as {parameter.dtype}, which torch does not know")
    tensor = torch.empty(parameter.shape, dtype=dtype)
    write_words(tensor, values, parameter.name)
    return tensor
