"""What a worker does with the servers before its first step: wait for them, make the tables, set first values."""

from __future__ import annotations

import time
from typing import Any

from torchfleet.errors import FleetError, ServerUnreachable
from torchfleet.role import RoleInfo
from torchfleet.storage import Storage
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.worker.client.client import Client
from torchfleet.worker.lookup.plan import Plan

START_SECONDS = 300.0  # servers import torch and may compile kernels before they answer
_CHUNK = 1 << 16  # rows in one message


def wait_for_servers(client: Client) -> None:
    """Servers may still be starting; one that is not there after START_SECONDS is named."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.ping()
            return
        except ServerUnreachable:
            if time.monotonic() >= deadline:
                raise


def check_loaded(client: Client, dirname: str) -> None:
    """Servers load when they start; a worker that counts on it must not find them empty."""
    wanted = Storage(dirname).path
    for number, server in enumerate(client.stats()):
        if server["model"] != wanted:
            raise FleetError(
                f"init_worker('{dirname}'): server {number} has loaded {server['model'] or 'no model'}. Give "
                f"fleet.init_server('{dirname}') the same folder."
            )


def make_tables(client: Client, plan: Plan, info: RoleInfo, strategy: DistributedStrategy) -> None:
    """Worker 0 makes the tables and sets what was not loaded; all workers then have the servers' dense values."""
    if info.worker_index == 0 and not info.restart:
        for spec in plan.specs:
            client.create_table(spec)
        tables = [server["tables"] for server in client.stats()]
        _set_sparse(client, plan, tables)
        _set_dense(client, plan, tables)
    if info.num_workers > 1 and not info.restart:
        _wait_for_first_values(client, plan, info, strategy)
    for dense in (*plan.dense, *plan.fixed):
        dense.write(client.pull_dense(dense.spec.name).result())


def _set_sparse(client: Client, plan: Plan, tables: list[dict[str, Any]]) -> None:
    """First values of converted torch embeddings, unless a server has loaded rows of the table."""
    for name, group in plan.sparse.items():
        first = group.modules[0].first_values
        if first is None or any(server[name]["loaded"] for server in tables):
            continue
        for start in range(0, len(first), _CHUNK):
            rows = first[start : start + _CHUNK]
            client.assign(name, range(start, start + len(rows)), rows)


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
    names = {dense.spec.name for dense in (*plan.dense, *plan.fixed)}
    if strategy.a_sync_configs.launch_barrier or not names:
        client.barrier("start", info.num_workers, max(START_SECONDS, strategy.sync_timeout))
        return
    deadline = time.monotonic() + START_SECONDS
    while not all(server["tables"][name]["is_set"] for server in client.stats() for name in names):
        if time.monotonic() > deadline:
            raise FleetError(f"after {START_SECONDS:g} s worker 0 has not set the first values; look at its log")
        time.sleep(0.05)
