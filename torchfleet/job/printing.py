"""Texts about a job for its users: the settings at its start, its tables, and a summary at its end."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from torchfleet.monitor.freshness import advice, summed
from torchfleet.role import RoleInfo
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.worker.lookup.plan import Plan


def configuration(info: RoleInfo, strategy: DistributedStrategy) -> str:
    """The effective settings at the start of a worker."""
    place = "one process" if info.is_local else f"{info.num_servers} servers, {info.num_workers} workers"
    sockets = "sockets of this user" if info.socket_dir else "plain"
    security = "in process" if info.is_local else "keys" if info.key_dir else sockets
    table = Table(title=f"torchfleet worker {info.worker_index}", title_justify="left")
    table.add_column("setting")
    table.add_column("value", overflow="fold")
    table.add_row("fleet", f"{place} ({security})")
    for line in repr(strategy).splitlines()[1:]:
        name, _, value = line.strip().partition(" ")
        table.add_row(name, value.strip())
    return _text(table)


def tables(plan: Plan, info: RoleInfo, servers: list[dict[str, Any]]) -> str:
    """The plan, and the rows and bytes on each server if they were asked."""
    planned = Table(title="plan", title_justify="left")
    for heading in ("table", "kind", "size", "optimizer", "first values", "entry", "parameters"):
        planned.add_column(heading, overflow="fold")
    for line in plan.describe():
        planned.add_row(*line)
    held = Table(title="servers", title_justify="left")
    for heading in ("server", "table", "kind", "rows", "bytes", "updates"):
        held.add_column(heading, overflow="fold")
    for i, server in enumerate(servers):
        where = info.server_endpoints[i] if info.server_endpoints else "in process"
        for name, found in server["tables"].items():
            held.add_row(
                f"{i} ({where})", name, found["kind"], f"{found['rows']:,}", f"{found['bytes']:,}", str(found["step"])
            )
    return _text(planned) + (_text(held) if servers else "")


def summary(stats: dict[str, Any]) -> str:
    """The end of training in a few lines: how old the network and the rows of each table were, over all servers."""
    worker = stats["worker"]
    lines = [
        f"{stats['mode']}: {worker['steps']:,} steps, {worker['samples']:,} samples on this worker, "
        f"{worker['unforeseen_lookups']:,} of {worker['lookups']:,} lookups unforeseen"
    ]
    names = dict.fromkeys(name for server in stats["servers"] for name in server["tables"])
    for name in names:
        tables = [server["tables"][name] for server in stats["servers"] if name in server["tables"]]
        counts = summed(table["staleness"] for table in tables)
        if not counts:
            continue
        what = "the network" if tables[0]["kind"] == "dense" else "rows"
        text = ", ".join(f"{age}: {count:,}" for age, count in counts.items())
        lines.append(f"staleness of '{name}' ({what}; updates between pull and push: pushes): {text}")
    if stats["dropped"]:
        lines.append(f"{stats['dropped']:,} gradients of the network were too old and dropped, counted on each server")
    return "\n".join([*lines, *filter(None, [advice(stats["staleness_dense"])])])


def _text(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=120, markup=False, emoji=False, highlight=False).print(table)  # names are not markup
    return out.getvalue()
