"""Tells servers about processes that have ended, so that they need not wait for a timeout."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torchfleet.base.errors import FleetError
from torchfleet.ps.net import addresses
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.net.replica_channels import ReplicaChannels
from torchfleet.ps.net.wire import Command, Role, pack
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Connection, Patience

_PATIENCE = Patience(timeout=1.0, retries=1)


def leave_for(worker: int, way: Way, servers: Sequence[str]) -> None:
    """Leave the job on behalf of a lost worker, so that the servers end when the other workers are done. Raises
    FleetError if a server does not answer."""
    keys = KeyFolder(way.key_dir) if way.key_dir else None
    endpoints = [way.endpoint(address) for address in servers]
    with Client.connect(endpoints, keys, worker=worker, role=Role.LAUNCHER, patience=Patience(5.0, 1)) as client:
        client.leave()


def tell_of_loss(endpoint: str, keys: KeyFolder | None, shard: int, replica: int, restart: int) -> bool:
    """Tell the replica at `endpoint` that the process of `replica`, after `restart` restarts, has ended. Returns
    whether it received the message; if not, it detects the loss by a timeout."""
    channel = ReplicaChannels([addresses.connect(endpoint, keys, Role.LAUNCHER)], shard, Role.LAUNCHER)
    connection = Connection(f"server {shard} ({endpoint})", channel, 0, Role.LAUNCHER, _PATIENCE, 1)
    with contextlib.closing(connection), contextlib.suppress(FleetError):
        connection.wait(connection.submit(Command.LOST, [pack({"replica": replica, "restart": restart})]))
        return True
    return False
