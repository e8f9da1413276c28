"""A model that is ready to be served: its versions, what computes them, and its description for the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.api.serving.description import ServingDescription, read_saved
from torchfleet.apps.serve.model_version import ModelSource, ModelVersion
from torchfleet.apps.serve.predictor import Predictor
from torchfleet.apps.serve.samples import Samples
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.shards.followed_shards import FollowedShards, open_followed_shards
from torchfleet.apps.serve.shards.sharded_model import ShardedModel, open_sharded
from torchfleet.apps.serve.versions.mapped_model import MappedModel, open_mapped
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import FILE


class ServedModel:
    """Opens the model of a folder. A new version becomes current as a whole: features, graph and numbers.

    If its description or the shapes of its numbers differ, the source's thread makes another Predictor first and
    computes a sample with it; an error keeps the old version. A request is answered by the Predictor that decoded it.
    """

    def __init__(self, settings: ServeSettings, source: ModelSource | None = None) -> None:
        """`source`: where the versions come from; None: from the folder or the servers that `settings` names."""
        self._settings = settings
        self._source = source or _opened(settings)
        self.is_remote = bool(getattr(self._source, "is_remote", False))  # reading rows waits for other machines
        try:
            self.predictor = Predictor(settings, self._source.current())
            self._source.tell(self._take)
        except BaseException:
            self._source.close()
            raise

    @property
    def described(self) -> ServingDescription:
        """Of the current version."""
        return self.predictor.described

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
        """The current one."""
        return self.predictor.version

    def predictor_of(self, requests: Sequence[Samples]) -> Predictor:
        """The Predictor that decoded these requests, which must be the same for all."""
        predictor = requests[0].decoded_by
        return predictor if isinstance(predictor, Predictor) else self.predictor

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
        predictor = self.predictor
        return {
            "name": self._settings.name,
            "versions": [str(predictor.version.number)],
            "platform": "torchfleet",
            "inputs": predictor.inputs,
            "outputs": predictor.outputs,
        }

    def close(self) -> None:
        self._source.close()

    def _take(self, version: ModelVersion) -> None:
        """Make a version current. Runs in the thread of the source."""
        if self.predictor.fits(version):
            self.predictor.version = version
        else:
            self.predictor = Predictor(self._settings, version)


def _opened(settings: ServeSettings) -> ModelSource:
    storage = Storage(settings.model)
    if not storage.exists(FILE):
        raise CheckpointError(f"there is no saved model in {storage.path}: {FILE} is missing")
    read_saved(storage)  # a model that cannot be served is refused before its rows are read
    if settings.shards:
        return open_followed_shards(settings) if settings.follow else open_sharded(settings)
    servers, keys = settings.followed, settings.key_dir or None
    return open_mapped(settings.model, bool(settings.follow), settings.workdir or None, servers, keys)
