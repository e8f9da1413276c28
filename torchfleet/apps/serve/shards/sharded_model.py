"""A model whose tables are larger than this machine: rows on read-only servers, the network here.

python -m torchfleet.server --read_only MODEL --shard 0/2 --endpoint tcp://127.0.0.1:7000
python -m torchfleet.server --read_only MODEL --shard 1/2 --endpoint tcp://127.0.0.1:7001
fleet serve MODEL --shards 127.0.0.1:7000,127.0.0.1:7001
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.infer import load_tensors
from torchfleet.api.serving.description import ServingDescription, read_saved
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.shards.hedged_read import Shard, finish
from torchfleet.apps.serve.shards.row_cache import RowCache
from torchfleet.apps.serve.shards.shard_replica import ServedSave, ServedShard, ShardReplica
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.server.read_only import served_spec
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.settings.table_size import parse_bytes
from torchfleet.ps.worker.client.shard import shard

DEFAULT_CACHE_BYTES = 256 << 20
TIMEOUT = 2.0  # seconds that one server may take to answer


class ShardedVersion:
    """The version that the servers have loaded. Rows that were read last are kept here."""

    def __init__(
        self,
        manifest: Manifest,
        described: ServingDescription,
        parameters: Mapping[str, torch.Tensor],
        specs: Mapping[str, TableSpec],
        shards: Sequence[Shard],
        cache_bytes: int,
    ) -> None:
        self.number, self.created = manifest.number, manifest.time
        self.described = described
        self._parameters, self._specs, self._shards = parameters, specs, shards
        self.caches: dict[str, RowCache] = {}
        if cache_bytes and specs:
            share = cache_bytes // len(specs)
            self.caches = {name: RowCache(spec.dim, share) for name, spec in specs.items()}

    def rows(self, table: str, keys: npt.NDArray[np.int64]) -> Floats:
        """As ModelVersion.rows. Raises ServerUnreachable if no replica of a shard answers."""
        distinct, places = np.unique(keys, return_inverse=True)
        cache = self.caches.get(table)
        if cache is None:
            return self._read(table, distinct)[places]
        rows, is_here = cache.take(distinct)
        if not is_here.all():
            missing = distinct[~is_here]
            read = self._read(table, missing)
            rows[~is_here] = read
            cache.put(missing, read)
        return rows[places]

    def known_rows(self, table: str, keys: npt.NDArray[np.int64]) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """As ModelVersion.known_rows, but servers do not say which ids have a row: a row of zeros counts as none."""
        rows = self.rows(table, keys)
        return rows, np.asarray(rows.any(axis=1))

    @property
    def tables(self) -> Mapping[str, int]:
        """As ModelVersion.tables."""
        return {name: spec.dim for name, spec in self._specs.items()}

    def dim(self, table: str) -> int:
        return self._spec(table).dim

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    def _read(self, table: str, keys: npt.NDArray[np.int64]) -> Floats:
        """Rows of distinct keys from the servers. An id outside of a declared size has no row, and reads as zeros."""
        spec = self._spec(table)
        rows = np.zeros((len(keys), spec.dim), np.float32)
        is_known = (keys >= 0) & (keys < spec.size) if spec.has_size else np.ones(len(keys), np.bool_)
        if is_known.any():
            rows[is_known] = self._read_known(spec, keys[is_known].view(np.uint64))
        return rows

    def _read_known(self, spec: TableSpec, keys: npt.NDArray[np.uint64]) -> Floats:
        cut = shard(spec, keys, len(self._shards))
        asked = [i for i, own in enumerate(cut.keys) if len(own)]
        found = finish([self._shards[i].read(spec.name, cut.keys[i]) for i in asked])
        by_shard = [np.empty((0, spec.dim), np.float32)] * len(self._shards)
        for i, rows in zip(asked, found, strict=True):
            by_shard[i] = rows
        return cut.join_rows(by_shard)

    def _spec(self, table: str) -> TableSpec:
        if table not in self._specs:
            raise CheckpointError(f"this model has no table '{table}'; it has {', '.join(self._specs) or 'none'}")
        return self._specs[table]


class ShardedModel:
    """A ModelSource: the model in `folder`, with its rows on servers, one shard on each. Any thread may read rows."""

    is_remote = True  # a read waits for other machines

    def __init__(
        self,
        folder: str,
        shards: Sequence[str],
        backups: Sequence[str] = (),
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        keys: KeyFolder | None = None,
        timeout: float = TIMEOUT,
        held: ServedSave | None = None,
    ) -> None:
        """`shards`: addresses by shard; `backups`: none, or one for each, in the same order. `cache_bytes`: for all
        tables together; 0: no cache. `held`: the save that the servers hold; None: the newest one. Raises FleetError if
        a shard is not served from this save by any replica.
        """
        if backups and len(backups) != len(shards):
            raise FleetError(
                f"--backups: expected one address for each of the {len(shards)} shards, in their order; found "
                f"{len(backups)}"
            )
        storage = Storage(folder)
        manifest, described = read_saved(storage)
        specs = {table.name: served_spec(table) for table in manifest.tables if not table.is_dense}
        held = held or ServedSave(manifest.save, manifest.token)
        columns = [list(shards), list(backups)] if backups else [list(shards)]
        self._shards = []
        for i in range(len(shards)):
            expected = ServedShard(held.save, held.token, i, len(shards))
            made = [ShardReplica(column[i], expected, [*specs.values()], keys, timeout) for column in columns]
            self._shards.append(Shard(made))
        try:
            for one in self._shards:
                _check(one)
            tensors = load_tensors(storage, manifest)
            self._version = ShardedVersion(manifest, described, tensors, specs, self._shards, cache_bytes)
        except BaseException:
            self.close()
            raise

    def current(self) -> ShardedVersion:
        return self._version

    def tell(self, take: Callable[[ShardedVersion], None]) -> None:
        """As ModelSource.tell. There are no later versions."""
        take(self._version)

    def close(self) -> None:
        for one in self._shards:
            for replica in one.replicas:
                replica.close()

    @property
    def is_served(self) -> bool:
        """Whether each shard has a server that answered last."""
        return all(any(not replica.is_lost for replica in one.replicas) for one in self._shards)

    def look(self) -> None:
        """Ask each server, at most every PROBE_PAUSE seconds and in the background, whether it is there."""
        for one in self._shards:
            for replica in one.replicas:
                replica.look()

    def metrics(self) -> dict[str, float]:
        """By name in SHARD_FIELDS: counters since the start, bytes of the cache, and how many servers are lost now."""
        caches, counts = self._version.caches.values(), [one.counts for one in self._shards]
        hits, misses = sum(cache.num_hits for cache in caches), sum(cache.num_misses for cache in caches)
        return {
            "row_cache_hits": hits,
            "row_cache_misses": misses,
            "row_cache_bytes": sum(cache.num_bytes for cache in caches),
            "shard_reads": sum(own.num_reads for own in counts),
            "shard_hedged_reads": sum(own.num_hedged for own in counts),
            "shard_hedged_reads_won": sum(own.num_won for own in counts),
            "shard_failed_over_reads": sum(own.num_failed_over for own in counts),
            "shard_failed_reads": sum(own.num_failed for own in counts),
            "shard_replicas_lost": sum(replica.is_lost for one in self._shards for replica in one.replicas),
        }


def _check(one: Shard) -> None:
    """Raise the first replica's FleetError if no replica of the shard serves what is expected. A replica that does not
    is lost.
    """
    errors = [error for replica in one.replicas if (error := replica.trouble()) is not None]
    if len(errors) == len(one.replicas):
        raise errors[0]


def open_sharded(settings: ServeSettings, held: ServedSave | None = None) -> ShardedModel:
    """The model that the options of `fleet serve` describe. `held`: as in ShardedModel."""
    cache_bytes = 0 if settings.row_cache == "0" else parse_bytes(settings.row_cache, "--row_cache")
    key_dir = settings.key_dir or os.environ.get("FLEET_KEY_DIR")
    return ShardedModel(
        settings.model,
        endpoints_of("--shards", settings.shards),
        endpoints_of("--backups", settings.backups) if settings.backups else (),
        cache_bytes,
        KeyFolder(key_dir) if key_dir else None,
        timeout=TIMEOUT,
        held=held,
    )


def endpoints_of(option: str, text: str) -> list[str]:
    """Parse HOST:PORT[,HOST:PORT]; tcp:// before it may be left out. Raises FleetError."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise FleetError(f"{option}: expected HOST:PORT with commas between, found {text!r}")
    return [part if "://" in part else f"tcp://{part}" for part in found]
