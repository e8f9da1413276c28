"""How a worker joins its job: its description of the job, the checks of its mode, and its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchfleet import __version__
from torchfleet.api.job.job_setup import JobSetup
from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.role.role_info import LOSS_END, RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.requests import Joined
from torchfleet.ps.worker.membership import Membership

MAX_VALUE = 1000  # characters: a server accepts a few more
FREE_MODES = ("async", "half_async", "geo")  # modes in which no worker waits for another


def join(
    setup: JobSetup, client: Client, own: Client, exchange: str, waiting_share: Callable[[], float | None]
) -> Membership:
    """Join the job on all servers. `own`: the client of the membership, which closes it. `exchange`: as in `claims_of`;
    `waiting_share`: as in Membership. Raises RoleError if a server refuses this worker or has another release.
    """
    strategy, info = setup.strategy, setup.info
    assert strategy is not None
    check_releases(client)
    claims = claims_of(setup.plan.specs, strategy, info.num_servers, exchange)
    joins = info if strategy.mode in FREE_MODES else replace(info, max_restart=0)  # else no worker awaits its restart
    return Membership(own, joins, strategy.sync_timeout, waiting_share, claims)


def with_restarts(info: RoleInfo, strategy: DistributedStrategy, membership: Membership) -> RoleInfo:
    """The role with the number of restarts that the servers know of."""
    if strategy.mode == "hybrid" and info.on_worker_loss == LOSS_END:
        return info  # ranks start together, and their launcher counts the restarts
    return replace(info, restart=max(info.restart, *(joined.restarts for joined in membership.told)))


def claims_of(
    specs: Sequence[TableSpec], strategy: DistributedStrategy, num_servers: int, exchange: str = ""
) -> list[dict[str, Any]]:
    """The worker's description of its job, which servers compare with those of other workers.

    By server: release, place, strategy and tables, as JOIN carries them. `exchange`: how this worker exchanges the
    network in hybrid mode.
    """
    fields = {name: _value(value) for name, value in strategy.shared_fields().items()}
    if exchange:
        fields["a_sync_configs.exchange"] = exchange
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
    """Raise RoleError for a server of another release, which might not understand a worker's description of its job."""
    for number, server in enumerate(client.stats()):
        found = str(server.get("release"))[:64]
        if found != __version__:
            raise RoleError(
                f"this worker has torchfleet {__version__}, and server {number} has {found!r}: install the same "
                "release everywhere."
            )


def _value(value: Any) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float)) else str(value)[:MAX_VALUE]


def check_loss_rule(mode: str, info: RoleInfo) -> None:
    """Raise RoleError if the job is elastic and this mode does not let workers come and go."""
    modes = (*FREE_MODES, "hybrid")  # hybrid: if the network is exchanged through the servers (exchange_choice.py)
    if info.is_elastic and mode not in modes:
        raise RoleError(
            f"FLEET_MIN_WORKERS={info.min_workers} lets workers come and go, which is for {', '.join(modes)}; "
            f"this is {mode}. Leave it out, or train in one of these modes."
        )


def catch_up(client: Client, told: Sequence[Joined], num_optimizers: int, timeout: float) -> int:
    """Determine this worker's first step, the same on all servers.

    Once the worker has joined, each server's step waits for it. Servers may be one step apart: the previous process was
    killed when only some servers had its push, or the other workers continued between two replies. The steps of several
    optimizers in one loop belong together. Servers that are behind make the missing steps without this worker's
    gradients.
    """
    steps = [joined.step for joined in told]
    first = -(-max(steps) // num_optimizers) * num_optimizers
    for step in range(min(steps), first):
        behind = [server for server, own in enumerate(steps) if own <= step]
        tell(f"step {step} is made without this worker's part on {len(behind)} of {len(told)} servers")
        client.skip_step(behind, timeout)
    return first // num_optimizers
