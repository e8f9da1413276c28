"""Rows on read-only servers; on this machine, the rows that a job has changed since the servers' save.

The servers' rows never change, and the changed rows are a version that is replaced in one step: a request sees one
version, however many shards its rows are on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.serving.description import ServingDescription
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.shards.shard_replica import served_save
from torchfleet.apps.serve.shards.sharded_model import TIMEOUT, ShardedModel, ShardedVersion, endpoints_of, open_sharded
from torchfleet.apps.serve.versions.follower import FollowSettings
from torchfleet.apps.serve.versions.level_file import ALIVE, OPEN
from torchfleet.apps.serve.versions.mapped_model import MappedModel, open_mapped
from torchfleet.apps.serve.versions.mapped_version import MappedVersion
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.tables.settings.spec import Floats


class OverlaidVersion:
    """Reads rows that changed since the servers' save from this machine, and all other rows from the servers."""

    def __init__(self, changed: MappedVersion, base: ShardedVersion) -> None:
        self.changed, self._base = changed, base
        self.number, self.created = changed.number, changed.created

    def rows(self, table: str, keys: npt.NDArray[np.int64]) -> Floats:
        """As ModelVersion.rows. Raises ServerUnreachable if no replica of a shard answers."""
        return self.known_rows(table, keys)[0]

    def known_rows(self, table: str, keys: npt.NDArray[np.int64]) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """As ModelVersion.known_rows. Raises ServerUnreachable if no replica of a shard answers."""
        rows, found = self.changed.changed_rows(table, keys)
        is_known, is_open = found == ALIVE, found == OPEN
        if is_open.any():
            rows[is_open], is_known[is_open] = self._base.known_rows(table, keys[is_open])
        return rows, is_known

    @property
    def described(self) -> ServingDescription:
        """As ModelVersion.described."""
        return self.changed.described

    @property
    def tables(self) -> Mapping[str, int]:
        """As ModelVersion.tables."""
        return self._base.tables

    def dim(self, table: str) -> int:
        return self._base.dim(table)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.changed.parameters()


class FollowedShards:
    """A ModelSource. Owns `base` and `changes`."""

    is_remote = True  # a read waits for other machines

    def __init__(self, base: ShardedModel, changes: MappedModel) -> None:
        self._base, self._changes = base, changes
        self._version = OverlaidVersion(changes.current(), base.current())

    def current(self) -> OverlaidVersion:
        changed = self._changes.current()
        if self._version.changed is not changed:
            self._version = OverlaidVersion(changed, self._base.current())
        return self._version

    def tell(self, take: Callable[[OverlaidVersion], None]) -> None:
        """As ModelSource.tell."""
        self._changes.tell(lambda changed: take(OverlaidVersion(changed, self._base.current())))

    def metrics(self) -> dict[str, float]:
        """As ShardedModel.metrics."""
        return self._base.metrics()

    @property
    def is_served(self) -> bool:
        """As ShardedModel.is_served."""
        return self._base.is_served

    def look(self) -> None:
        """As ShardedModel.look."""
        self._base.look()

    def figures(self) -> dict[str, float]:
        """As MappedModel.figures."""
        return self._changes.figures()

    def close(self) -> None:
        self._changes.close()
        self._base.close()


def open_followed_shards(settings: ServeSettings) -> FollowedShards:
    """The model that the options of `fleet serve` describe. Raises FleetError if no server of the first shard answers,
    or if the saves that are followed do not contain the one that the servers hold.
    """
    key_dir = settings.key_dir or os.environ.get("FLEET_KEY_DIR")
    first = [endpoints_of("--shards", settings.shards)[0]]
    first += endpoints_of("--backups", settings.backups)[:1] if settings.backups else []
    held = served_save(first, KeyFolder(key_dir) if key_dir else None, TIMEOUT)
    base = open_sharded(settings, held)
    try:
        follow = FollowSettings(settings.model, base=held.save, base_time=held.time)
        return FollowedShards(base, open_mapped(settings.model, True, settings.workdir or None, settings=follow))
    except BaseException:
        base.close()
        raise
