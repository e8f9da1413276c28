"""A server of a saved model: it loads one shard of the rows, answers reads, and refuses everything that changes rows.

Serving reads tables from such servers when they are larger than one machine (apps/serve/shards/sharded_model.py).
"""

from __future__ import annotations

import re
from typing import Any

from torchfleet.base.errors import CheckpointError, FleetError, PermissionRefused
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import check_written
from torchfleet.ps.checkpoint.manifest import Manifest, Table, read_manifest
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import NO_CREATE, VERSIONS, Command
from torchfleet.ps.server.layers import Result, Run
from torchfleet.ps.server.refusals import name_of
from torchfleet.ps.server.saves.table_loading import ChosenModel
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import MAX_SHARDS, Rule, TableSpec

_READS = frozenset({Command.PING, Command.STATS, Command.INSPECT, Command.WALK, Command.STOP})
_SHARD = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


class ReadOnly:
    """The layer that refuses all commands but reads. A pull must have the flag NO_CREATE: others create rows."""

    def around(self, inner: Run, request: Request) -> Result:
        """As Layer.around."""
        message = request.message
        is_read = message.command in _READS
        if message.command == Command.PULL:
            is_read = bool(message.flags & NO_CREATE) and not message.flags & ~(NO_CREATE | VERSIONS)
        if not is_read:
            raise PermissionRefused(
                f"{name_of(message)}: this server is read-only. It serves a saved model and takes pulls that create no "
                "rows; train on the servers of a job."
            )
        return inner(request)


def serve_saved(server: Server, dirname: str, shard: int, num_shards: int) -> int:
    """Load shard number `shard` of `num_shards` of every sparse table of a saved model, and refuse changes from now on.

    Returns the number of rows. Rows have no optimizer state here. Raises CheckpointError; the server is then of no use.
    """
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    saved = [table for table in manifest.tables if not table.is_dense]
    if not saved:
        raise CheckpointError(f"{storage.path} has no sparse table, so there are no rows to serve")
    for link in manifest.links():
        check_written(storage, link.save, {part.file: part.bytes for part in link.parts})
    state = server.state
    model = ChosenModel(storage, manifest, [table.name for table in saved], {})
    for table in saved:
        state.add_table(served_spec(table).for_shard(shard, num_shards))
    for made in state.tables.values():
        made.restore(model)
    state.saves.model = storage.path
    state.served = _described(manifest, shard, num_shards)
    server.refuse_changes(ReadOnly())
    return sum(table.num_rows for table in state.tables.values())


def served_spec(saved: Table) -> TableSpec:
    """The spec with which a saved table is served: the same rows and keys, without a rule, policies and state."""
    return TableSpec(saved.name, saved.kind, saved.dim, saved.size, Rule(lr=0.0))


def _described(manifest: Manifest, shard: int, num_shards: int) -> dict[str, Any]:
    """The description of the served model in STATS. Clients compare it with the save that their network comes from."""
    place = {"shard": shard, "num_shards": num_shards}
    return {"save": manifest.save, "token": manifest.token, "time": manifest.links()[-1].time, **place}


def shard_of(text: str) -> tuple[int, int]:
    """Parse --shard K/N. Raises FleetError."""
    found = _SHARD.fullmatch(text)
    shard, num_shards = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 <= shard < num_shards <= MAX_SHARDS:
        raise FleetError(f"--shard: expected K/N, the shard and how many there are, such as 0/4 to 3/4; found {text!r}")
    return shard, num_shards
