"""What decodes requests and computes them: features and graph of a description, and the newest version that has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.api.serving.description import ServingDescription
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol
from torchfleet.apps.serve.model_version import ModelVersion
from torchfleet.apps.serve.network import GraphNetwork, Network, check_tables
from torchfleet.apps.serve.samples import Joiner, Samples, split_outputs
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.tensors import datatype_of
from torchfleet.apps.serve.user_network import UserNetwork
from torchfleet.base.errors import CheckpointError, DataError, TableError, WrongIds
from torchfleet.data.features import Feature

Result = tuple[ModelVersion, dict[str, npt.NDArray[Any]]]
_REQUEST_ERRORS = (DataError, TableError, WrongIds, OverflowError)  # caused by the contents of a request


class WrongRequest(Exception):
    """A request that the model cannot take, found when it was computed."""


class Predictor:
    """Predicts batches. Used by one thread, after the thread that made it."""

    def __init__(self, settings: ServeSettings, version: ModelVersion) -> None:
        """Computes one sample of zeros, so that an error comes before the first request. Raises CheckpointError if the
        version cannot be served.
        """
        self.version, self.described = version, version.described
        self._shapes = _shapes(version)
        self._network, self._joiner = network_of(settings, version), Joiner(self.described.features)
        (result,) = self.predict([zeros(self.described)])
        if isinstance(result, Exception):
            raise result
        self.take_unknown_ids()  # of the zeros
        self.outputs: list[dict[str, Any]] = [
            {"name": name, "datatype": datatype_of(array.dtype.name), "shape": [-1, *array.shape[1:]]}
            for name, array in result[1].items()
        ]
        self.inputs = [_input_of(feature) for feature in self.described.features]
        self.protocol = InferenceProtocol(self.described, [out["name"] for out in self.outputs], settings.max_batch)

    def fits(self, version: ModelVersion) -> bool:
        """Whether another version differs in numbers alone: then set `version` to it."""
        described = version.described
        return (described is self.described or described == self.described) and _shapes(version) == self._shapes

    def take_unknown_ids(self) -> dict[str, int]:
        """By table, where there are some: the ids without a row that were looked up since the last call."""
        found = {table: num for table, num in self._network.unknown_ids.items() if num}
        for table in found:
            self._network.unknown_ids[table] = 0
        return found

    def predict(self, requests: Sequence[Samples]) -> list[Result | Exception]:
        """A result or an exception for each request. If a batch fails, its requests are computed one by one."""
        version = self.version
        try:
            outputs = self._network.run(self._joiner.joined(requests), version)
            return [(version, part) for part in split_outputs(outputs, requests)]
        except Exception as error:  # the network may raise anything, and the other requests must be answered
            if len(requests) > 1:
                return [result for request in requests for result in self.predict([request])]
            return [WrongRequest(str(error)) if isinstance(error, _REQUEST_ERRORS) else error]


def network_of(settings: ServeSettings, version: ModelVersion) -> Network:
    """The saved network, or the user's own. Raises CheckpointError if the model has no saved network."""
    described = version.described
    if settings.network:
        return UserNetwork(settings.network, described, version.tables)
    if described.network is None:
        raise CheckpointError(
            f"{settings.model} has no network that can run without its code: {described.reason}. Give the module by "
            "--network FILE.py:FACTORY, a class or function without arguments that makes it"
        )
    check_tables(described.network, version)
    return GraphNetwork(described.network, described.features)


def zeros(described: ServingDescription) -> Samples:
    """A sample of zeros: computed once before the first request, it finds errors and compiles kernels."""
    values = {feature.name: np.zeros(feature.num_values) for feature in described.features if feature.shape is not None}
    ragged = [feature.name for feature in described.features if feature.shape is None]
    none: dict[str, Any] = {name: np.zeros(0) for name in ragged}
    return Samples(1, {**values, **none}, {name: np.zeros(1, np.int64) for name in ragged})


def _input_of(feature: Feature) -> dict[str, Any]:
    """An input in the model's metadata: the datatype that the feature is meant for, and how values become ids."""
    if feature.takes_strings and (feature.vocabulary or feature.hash_size or feature.hash_seed):
        datatype = "BYTES"
    else:
        datatype = "FP32" if feature.buckets else datatype_of(feature.dtype)
    found = {
        "vocabulary_size": len(feature.vocabulary),
        "buckets": feature.buckets,
        "hash_size": feature.hash_size,
        "hash_seed": feature.hash_seed,
        "num_ids": feature.num_ids,
    }
    parameters = {name: value for name, value in found.items() if value}
    if feature.missing is not None:
        parameters["missing"] = feature.missing
    shape = [-1, -1] if feature.shape is None else [-1, *feature.shape]
    made = {"name": feature.name, "datatype": datatype, "shape": shape}
    return {**made, "parameters": parameters} if parameters else made


def _shapes(version: ModelVersion) -> Any:
    parameters = {name: (tensor.dtype, tensor.shape) for name, tensor in version.parameters().items()}
    return dict(version.tables), parameters
