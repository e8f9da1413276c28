"""What a worker was told of its job, for servers to compare with what others were told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchfleet import __version__
from torchfleet.base.errors import RoleError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client

MAX_VALUE = 1000  # characters: a server takes a few more


def claims_of(specs: Sequence[TableSpec], strategy: DistributedStrategy, num_servers: int) -> list[dict[str, Any]]:
    """By server: release, place, strategy and tables, as JOIN carries them."""
    fields = {name: _value(value) for name, value in strategy.shared_fields().items()}
    return [
        {
            "release": __version__,
            "server": server,
            "num_servers": num_servers,
            "strategy": fields,
            "tables": [spec.for_shard(server, num_servers) for spec in specs],
        }
        for server in range(num_servers)
    ]


def check_releases(client: Client) -> None:
    """Raise RoleError for a server of another release, which might not read what a worker says of its job."""
    for number, server in enumerate(client.stats()):
        found = str(server.get("release"))[:64]
        if found != __version__:
            raise RoleError(
                f"this worker has torchfleet {__version__}, and server {number} has {found!r}: install the same "
                "release everywhere."
            )


def _value(value: Any) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float)) else str(value)[:MAX_VALUE]
