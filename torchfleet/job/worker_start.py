"""What a worker does with the servers before its first step: wait for them, make the tables, set first values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torchfleet.errors import FleetError, RoleError, ServerUnreachable
from torchfleet.role import LOSS_END, RoleInfo
from torchfleet.storage import Storage
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.connection import Patience
from torchfleet.worker.client.requests import Joined
from torchfleet.worker.lookup.plan import Plan
from torchfleet.worker.row_state.table_rows import slices

RECOVERY_TIMEOUT = 600.0  # seconds that a server with a log may be away: it reads all of it when it is started again
RESEND_PAUSE = 5.0  # seconds between two attempts to reach one
_FREE_MODES = ("async", "half_async", "geo")  # no worker waits for another
_PERIOD = 5.0  # seconds between two lines about servers that are not ready
_PAUSE = 0.1  # seconds between two questions to a server that is loading


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


def check_loss_rule(mode: str, info: RoleInfo) -> None:
    """Raise RoleError if this mode cannot keep to what was said about lost workers."""
    if info.is_elastic and mode not in _FREE_MODES:
        raise RoleError(
            f"FLEET_MIN_WORKERS={info.min_workers} lets workers come and go, which is for {', '.join(_FREE_MODES)}; this "
            f"is {mode}. Leave it out, or train in one of these modes."
        )
    if info.on_worker_loss != LOSS_END and mode == "hybrid":
        raise RoleError(
            f"on_worker_loss={info.on_worker_loss} is for sync, {', '.join(_FREE_MODES)}: in hybrid mode no worker can "
            "go on without another. Leave it out; --max_restart starts all workers again together."
        )


def catch_up(client: Client, told: Sequence[Joined], num_optimizers: int, timeout: float) -> int:
    """The step with which this worker begins, the same on all servers.

    From the moment it has joined, each server's step waits for it. Servers may be a step apart, if a worker was killed
    when only some had its push; and between the steps of several optimizers of one loop. What is behind is made without
    this worker's part.
    """
    first = -(-max(joined.step for joined in told) // num_optimizers) * num_optimizers
    for step in range(min(joined.step for joined in told), first):
        behind = [server for server, joined in enumerate(told) if joined.step <= step]
        print(f"step {step} is made without this worker's part on {len(behind)} of {len(told)} servers", flush=True)
        client.skip_step(behind, timeout)
    return first // num_optimizers


def make_tables(client: Client, plan: Plan, info: RoleInfo, strategy: DistributedStrategy) -> None:
    """Worker 0 makes the tables and sets what was not loaded; all workers then have the servers' dense values."""
    if info.worker_index == 0 and not (info.restart and _are_set(client, plan)):
        for spec in plan.specs:
            client.create_table(spec)
        tables = [server["tables"] for server in client.stats()]
        _set_sparse(client, plan, tables)
        _set_dense(client, plan, tables)
    if info.is_elastic:
        _wait_for(lambda: _are_set(client, plan), info, "worker 0 has not set the first values; look at its log")
        least = f"fewer than {info.min_workers} workers have come (FLEET_MIN_WORKERS)"
        _wait_for(lambda: client.stats()[0]["members"]["joined"] >= info.min_workers, info, least)
    elif info.num_workers > 1 and not (info.restart and _are_set(client, plan)):
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
    if strategy.a_sync_configs.launch_barrier or not (plan.dense or plan.fixed):
        client.barrier("start", info.num_workers, max(info.start_timeout, strategy.sync_timeout))
        return
    _wait_for(lambda: _are_set(client, plan), info, "worker 0 has not set the first values; look at its log")


def _are_set(client: Client, plan: Plan) -> bool:
    """Whether all tables are there, and worker 0 has set the dense ones, which it does last."""
    dense = {group.spec.name for group in (*plan.dense, *plan.fixed)}
    return all(
        spec.name in server["tables"] and (spec.name not in dense or server["tables"][spec.name]["is_set"])
        for server in client.stats()
        for spec in plan.specs
    )


def _wait_for(is_so: Callable[[], bool], info: RoleInfo, otherwise: str) -> None:
    deadline = time.monotonic() + info.start_timeout
    while not is_so():
        if time.monotonic() > deadline:
            raise FleetError(f"after {info.start_timeout:g} s (FLEET_START_TIMEOUT) {otherwise}")
        time.sleep(0.05)
