"""A model that is ready to be served: its versions, its network, and its description for the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchfleet.apps.serve.model_version import ModelSource, ModelVersion
from torchfleet.apps.serve.predictor import Predictor, description_of, network_of, zeros
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.shards.followed_shards import FollowedShards, open_followed_shards
from torchfleet.apps.serve.shards.sharded_model import ShardedModel, open_sharded
from torchfleet.apps.serve.tensors import datatype_of
from torchfleet.apps.serve.versions.mapped_model import MappedModel, open_mapped
from torchfleet.data.features import Feature


class ServedModel:
    """Opens the model of a folder and computes one sample of zeros, so that an error comes before the first request."""

    def __init__(self, settings: ServeSettings, source: ModelSource | None = None) -> None:
        """`source`: where the versions come from; None: from the folder or the servers that `settings` names."""
        self.described = description_of(settings)
        self._name = settings.name
        self._source = source or _opened(settings)
        self.is_remote = bool(getattr(self._source, "is_remote", False))  # reading rows waits for other machines
        network = network_of(settings, self.described, self._source.current())
        self.predictor = Predictor(self._source, network, self.described)
        (result,) = self.predictor.predict([zeros(self.described)])
        if isinstance(result, Exception):
            raise result
        self.predictor.take_unknown_ids()  # of the zeros
        self.outputs: list[dict[str, Any]] = [
            {"name": name, "datatype": datatype_of(array.dtype.name), "shape": [-1, *array.shape[1:]]}
            for name, array in result[1].items()
        ]
        self._inputs = [_input_of(feature) for feature in self.described.features]

    @property
    def shard_counts(self) -> Mapping[str, float]:
        """Figures of the reads from servers, by the names of SHARD_FIELDS; empty if the rows are on this machine."""
        return self._source.metrics() if isinstance(self._source, (ShardedModel, FollowedShards)) else {}

    @property
    def follow_figures(self) -> Mapping[str, float]:
        """Figures of the follower (gaps, troubles, ...) by name; empty without a follower."""
        return self._source.figures() if isinstance(self._source, (MappedModel, FollowedShards)) else {}

    @property
    def version(self) -> ModelVersion:
        return self._source.current()

    @property
    def is_ready(self) -> bool:
        """False while a shard of the rows has no server that answers."""
        return self._source.is_served if isinstance(self._source, (ShardedModel, FollowedShards)) else True

    def look(self) -> None:
        """Ask the servers of the rows, from time to time, whether they are there. Does not wait for their answers."""
        if isinstance(self._source, (ShardedModel, FollowedShards)):
            self._source.look()

    def metadata(self) -> dict[str, Any]:
        """As `GET v2/models/M` returns it."""
        return {
            "name": self._name,
            "versions": [str(self.version.number)],
            "platform": "torchfleet",
            "inputs": self._inputs,
            "outputs": self.outputs,
        }

    def close(self) -> None:
        self._source.close()


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


def _opened(settings: ServeSettings) -> ModelSource:
    if settings.shards:
        return open_followed_shards(settings) if settings.follow else open_sharded(settings)
    servers, keys = settings.followed, settings.key_dir or None
    return open_mapped(settings.model, bool(settings.follow), settings.workdir or None, servers, keys)
