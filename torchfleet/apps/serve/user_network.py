"""The user's own module as the network: `--network FILE.py:FACTORY`. Serving executes this code of the user."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchfleet.api.serving.description import ServingDescription
from torchfleet.api.serving.network_trace import outputs_of
from torchfleet.apps.serve.model_version import ModelVersion
from torchfleet.apps.serve.network import Outputs
from torchfleet.apps.serve.samples import JoinedBatch
from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.data.slots import Batch, Ragged
from torchfleet.ps.worker.client.future import Pulled, Ready
from torchfleet.ps.worker.client.shard import Keys
from torchfleet.ps.worker.embedding.conversion import convert, sparse_embeddings
from torchfleet.ps.worker.embedding.embedding_choice import saved_as_tables
from torchfleet.ps.worker.lookup.dense_group import saved_tensors
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.lookup.sources import ForPrediction


class VersionRows(ForPrediction):
    """Gives an Engine the rows of `version`, which must be set."""

    def __init__(self) -> None:
        self.version: ModelVersion | None = None
        self.unknown_ids: Counter[str] = Counter()

    def pull(self, keys: Mapping[str, Keys], create: bool, foreseen: bool = False) -> Ready:
        assert self.version is not None
        rows = {}
        for table, wanted in keys.items():
            rows[table], is_known = self.version.known_rows(table, wanted.view("int64"))
            self.unknown_ids[table] += int(np.count_nonzero(~is_known))
        return Ready(Pulled(rows, {table: [] for table in keys}))


class UserNetwork:
    """Calls the user's module as training did. Used by one thread."""

    def __init__(self, place: str, described: ServingDescription, tables: Collection[str]) -> None:
        """`place`: FILE.py:FACTORY. `tables`: names of the model's tables."""
        if described.call == "nested":
            raise ModelError(
                "the model was called with nested inputs in training, which requests do not give: call it with "
                "tensors, or with one batch, and save it again"
            )
        self._takes_batch = described.call == "batch"
        self._model = _made(place).eval()  # one of its own: another may be computing in another thread
        convert(self._model, saved_as_tables(self._model, tables))
        self._rows, modules = VersionRows(), sparse_embeddings(self._model)
        self._rows.unknown_ids.update(dict.fromkeys(sorted(modules), 0))
        self._engine = Engine(self._rows, modules)
        for module in (module for some in modules.values() for module in some):
            module.bind(self._engine)
        self._engine.follow(self._model, records=False)
        self._bound: ModelVersion | None = None

    @property
    def unknown_ids(self) -> Counter[str]:
        """As Network.unknown_ids; an id counts once in a batch."""
        return self._rows.unknown_ids

    @torch.no_grad()
    def run(self, batch: JoinedBatch, version: ModelVersion) -> Outputs:
        if self._bound is not version:
            self._bind(version)
        parts: dict[str, Any] = {
            name: Ragged(values, batch.offsets[name]) if name in batch.offsets else values
            for name, values in batch.values.items()
        }
        found = self._model(Batch(parts, batch.num)) if self._takes_batch else self._model(**parts)
        return {name: tensor.detach().numpy() for name, tensor in outputs_of(found).items()}

    def _bind(self, version: ModelVersion) -> None:
        """Take the parameters of a version, and read its rows from now on."""
        self._rows.version = version
        self._engine.end_step()
        found = version.parameters()
        for name, tensor in saved_tensors(self._model).items():
            if name not in found or found[name].shape != tensor.shape:
                raise CheckpointError(
                    f"the model has no parameter '{name}' of shape {tuple(tensor.shape)}: is --network its module?"
                )
            tensor.data.copy_(found[name])
        self._bound = version


def _made(place: str) -> torch.nn.Module:
    model = _factory(place)()
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"--network: expected {place} to make a torch.nn.Module, found {type(model).__name__}")
    return model


@functools.cache
def _factory(place: str) -> Callable[[], Any]:
    """What makes the module. Its file is executed once."""
    path, _, factory = place.rpartition(":")
    if not path or not factory.isidentifier() or not Path(path).is_file():
        raise ModelError(f"--network: expected FILE.py:FACTORY with a file that is there, found {place!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as for a script: its own imports are beside it
    spec.loader.exec_module(module)
    made: Any = getattr(module, factory, None)
    if not callable(made):
        raise ModelError(f"--network: {path} has no {factory}")
    return made  # type: ignore[no-any-return]
