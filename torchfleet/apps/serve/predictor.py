"""From samples to results: joins requests, takes the current version of the model, and runs the network on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.api.serving.description import ServingDescription, read_description
from torchfleet.apps.serve.model_version import ModelSource, ModelVersion
from torchfleet.apps.serve.network import GraphNetwork, Network, check_tables
from torchfleet.apps.serve.samples import Joiner, Samples, split_outputs
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.user_network import UserNetwork
from torchfleet.base.errors import CheckpointError, DataError, TableError, WrongIds
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import FILE, read_manifest

Result = tuple[ModelVersion, dict[str, npt.NDArray[Any]]]
_REQUEST_ERRORS = (DataError, TableError, WrongIds, OverflowError)  # caused by the contents of a request


class WrongRequest(Exception):
    """A request that the model cannot take, found when it was computed."""


class Predictor:
    """Predicts batches. All requests of a batch see one version."""

    def __init__(self, source: ModelSource, network: Network, described: ServingDescription) -> None:
        self.source, self._network, self._joiner = source, network, Joiner(described.features)

    def take_unknown_ids(self) -> dict[str, int]:
        """By table, where there are some: the ids without a row that were looked up since the last call."""
        found = {table: num for table, num in self._network.unknown_ids.items() if num}
        for table in found:
            self._network.unknown_ids[table] = 0
        return found

    @property
    def tables(self) -> list[str]:
        """The tables that the network looks up."""
        return sorted(self._network.unknown_ids)

    def predict(self, requests: Sequence[Samples]) -> list[Result | Exception]:
        """A result or an exception for each request. If a batch fails, its requests are computed one by one."""
        version = self.source.current()
        try:
            outputs = self._network.run(self._joiner.joined(requests), version)
            return [(version, part) for part in split_outputs(outputs, requests)]
        except Exception as error:  # the network may raise anything, and the other requests must be answered
            if len(requests) > 1:
                return [result for request in requests for result in self.predict([request])]
            return [WrongRequest(str(error)) if isinstance(error, _REQUEST_ERRORS) else error]


def network_of(settings: ServeSettings, described: ServingDescription, version: ModelVersion) -> Network:
    """The saved network, or the user's own. Raises CheckpointError if the model has no saved network."""
    if settings.network:
        tables = read_manifest(Storage(settings.model)).tables
        return UserNetwork(settings.network, described, {table.name for table in tables})
    if described.network is None:
        raise CheckpointError(
            f"{settings.model} has no network that can run without its code: {described.reason}. Give the module by "
            "--network FILE.py:FACTORY, a class or function without arguments that makes it"
        )
    check_tables(described.network, version)
    return GraphNetwork(described.network, described.features)


def description_of(settings: ServeSettings) -> ServingDescription:
    storage = Storage(settings.model)
    if not storage.exists(FILE):
        raise CheckpointError(f"there is no saved model in {storage.path}: {FILE} is missing")
    return read_description(storage)


def zeros(described: ServingDescription) -> Samples:
    """A sample of zeros: computed once before the first request, it finds errors and compiles kernels."""
    values = {feature.name: np.zeros(feature.num_values) for feature in described.features if feature.shape is not None}
    ragged = [feature.name for feature in described.features if feature.shape is None]
    none: dict[str, Any] = {name: np.zeros(0) for name in ragged}
    return Samples(1, {**values, **none}, {name: np.zeros(1, np.int64) for name in ragged})
