"""What a worker does with the servers before its first step: wait for them, make the tables, set first values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchfleet.errors import FleetError, ServerUnreachable
from torchfleet.role import RoleInfo
from torchfleet.storage import Storage
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.connection import Patience
from torchfleet.worker.lookup.plan import Plan
from torchfleet.worker.row_state.table_rows import slices

RECOVERY_TIMEOUT = 600.0  # seconds that a server with a log may be away: it reads all of it when it is started again
RESEND_PAUSE = 5.0  # seconds between two attempts to reach one
_PERIOD = 5.0  # seconds between two lines about servers that are not ready
_PAUSE = 0.1  # seconds between two questions to a server that is loading
_NO_VALUES = "worker 0 has not set the first values; look at its log"


def patience_with(strategy: DistributedStrategy, info: RoleInfo) -> Patience:
    """How long this process waits for a server: for one that keeps a log, until it has been started again."""
    if info.durability == "none":
        return Patience(strategy.rpc_timeout, strategy.rpc_retry_times)
    return Patience(max(strategy.rpc_timeout, RECOVERY_TIMEOUT), strategy.rpc_retry_times, RESEND_PAUSE)


def wait_for_servers(client: Client, seconds: float) -> None:
    """Return when all servers serve. They may be starting or loading: those that are waited for are printed.

    Raises ServerUnreachable for one that has given no sign for `seconds`. One that is loading gives signs.
    """
    started = time.monotonic()
    heard: dict[str, float] = {}  # by server, its last sign
    next_line = started + _PERIOD
    while waiting := client.unready(min(_PERIOD, seconds)):
        now = time.monotonic()
        heard |= {name: now for name, doing in waiting.items() if doing}
        for name in waiting:
            if now - heard.get(name, started) >= seconds:
                raise ServerUnreachable(_never_came(name, seconds))
        if now >= next_line:
            next_line = now + _PERIOD
            for name, doing in waiting.items():
                print(f"waiting for {name}: {doing or 'no answer yet'}, {now - started:.0f} s", flush=True)
        time.sleep(_PAUSE)


def _never_came(name: str, seconds: float) -> str:
    return (
        f"{name} has given no answer for {seconds:g} s (FLEET_START_TIMEOUT). Is it running, is this its address "
        "(FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST), and do both sides use the same keys, or none?"
    )


def check_loaded(client: Client, dirname: str) -> None:
    """Servers load when they start; a worker that counts on it must not find them empty."""
    wanted = Storage(dirname).path
    for number, server in enumerate(client.stats()):
        if server["model"] != wanted:
            raise FleetError(
                f"init_worker('{dirname}'): server {number} has loaded {server['model'] or 'no model'}. Give "
                f"fleet.init_server('{dirname}') the same folder."
            )


def with_known_restart(client: Client, info: RoleInfo) -> RoleInfo:
    """The role with the number of its starts, if the servers are to be asked for it: a process before this one had its
    number, and has not left."""
    if not info.asks_restart:
        return info
    members = (member for server in client.stats() for member in server["workers"])
    before = [member["restart"] for member in members if member["worker"] == info.worker_index]
    return replace(info, restart=max(before) + 1 if before else 0)


def make_tables(client: Client, plan: Plan, info: RoleInfo, strategy: DistributedStrategy) -> None:
    """Worker 0 makes the tables and sets what was not loaded; all workers then have the servers' dense values.

    One that was started again does so if the process before it has not come so far.
    """
    if info.worker_index == 0 and not (info.restart and _has_first_values(client, plan)):
        for spec in plan.specs:
            client.create_table(spec)
        tables = [server["tables"] for server in client.stats()]
        _set_sparse(client, plan, tables)
        _set_dense(client, plan, tables)
    if info.is_elastic:
        _wait_for(lambda: _has_first_values(client, plan), info, _NO_VALUES)
        least = f"fewer than {info.min_workers} workers have come (FLEET_MIN_WORKERS)"
        _wait_for(lambda: client.stats()[0]["members"]["joined"] >= info.min_workers, info, least)
    elif info.num_workers > 1:
        _wait_for_first_values(client, plan, info, strategy)
    for dense in (*plan.dense, *plan.fixed):
        dense.write(client.pull_dense(dense.spec.name).result())


def _set_sparse(client: Client, plan: Plan, tables: list[dict[str, Any]]) -> None:
    """First values, of torch's embeddings or of load_state_dict, unless a server has loaded rows of the table."""
    for name, group in plan.sparse.items():
        if not any(server[name]["loaded"] for server in tables):
            rows = group.modules[0].table_rows
            for keys, values in slices(rows.first_keys, rows.first_values):
                client.assign(name, keys, values)


def _set_dense(client: Client, plan: Plan, tables: list[dict[str, Any]]) -> None:
    """This worker's dense values, with those in their place that the servers have loaded."""
    for dense in (*plan.dense, *plan.fixed):
        values = dense.values()
        loaded = [bounds for server in tables for bounds in server[dense.spec.name]["loaded"]]
        if loaded:
            saved = client.pull_dense(dense.spec.name).result()
            for start, stop in loaded:
                values[start:stop] = saved[start:stop]
        client.set_dense(dense.spec.name, values)


def _wait_for_first_values(client: Client, plan: Plan, info: RoleInfo, strategy: DistributedStrategy) -> None:
    is_met = strategy.a_sync_configs.launch_barrier or not _named(plan)
    if is_met and not info.restart:  # the others have met without one that was started again
        client.barrier("start", info.num_workers, max(info.start_timeout, strategy.sync_timeout))
        return
    _wait_for(lambda: _has_first_values(client, plan), info, _NO_VALUES)


def _wait_for(is_so: Callable[[], bool], info: RoleInfo, otherwise: str) -> None:
    deadline = time.monotonic() + info.start_timeout
    while not is_so():
        if time.monotonic() > deadline:
            raise FleetError(f"after {info.start_timeout:g} s (FLEET_START_TIMEOUT) {otherwise}")
        time.sleep(0.05)


def _has_first_values(client: Client, plan: Plan) -> bool:
    """Whether worker 0 has set all that it sets; rows, which come first, are not looked at."""
    tables = [server["tables"] for server in client.stats()]
    return all(name in found and found[name]["is_set"] for found in tables for name in _named(plan))


def _named(plan: Plan) -> set[str]:
    return {dense.spec.name for dense in (*plan.dense, *plan.fixed)}
