"""Tells a replica that the other one's process has ended: it need not find that out by waiting."""

from __future__ import annotations

import contextlib

from torchfleet.errors import FleetError
from torchfleet.net import addresses
from torchfleet.net.keys import KeyFolder
from torchfleet.net.replica_channels import ReplicaChannels
from torchfleet.net.wire import Command, Role, pack
from torchfleet.worker.client.connection import Connection, Patience

_PATIENCE = Patience(timeout=1.0, retries=1)


def tell_of_loss(endpoint: str, keys: KeyFolder | None, shard: int, replica: int, restart: int) -> bool:
    """Tell the replica at `endpoint` that the process that was `replica` after so many restarts has ended. Returns
    whether it has heard; if not, it finds out by the silence."""
    channel = ReplicaChannels([addresses.connect(endpoint, keys, Role.LAUNCHER)], shard, Role.LAUNCHER)
    connection = Connection(f"server {shard} ({endpoint})", channel, 0, Role.LAUNCHER, _PATIENCE, 1)
    with contextlib.closing(connection), contextlib.suppress(FleetError):
        connection.wait(connection.submit(Command.LOST, [pack({"replica": replica, "restart": restart})]))
        return True
    return False
