"""`fleet inspect` for running servers."""

from __future__ import annotations

from typing import Any

import msgspec

from torchfleet.base.errors import FleetError
from torchfleet.base.printable import say
from torchfleet.observe.commands.drawing import print_summary, print_table
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import way_in
from torchfleet.ps.tables.summary import merged
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

_PATIENCE = Patience(timeout=10.0)


def inspect_servers(
    endpoints: list[str], keys: str | None, tables: list[str], histograms: bool, top: int, as_json: bool
) -> None:
    """Print the tables of these servers; histograms and top keys of `tables`, or of all sparse ones."""
    reached, keys = way_in(endpoints, keys)
    with Client.connect(reached, KeyFolder(keys) if keys else None, patience=_PATIENCE) as client:
        servers = client.stats()
        known = {name: table["is_dense"] for server in servers for name, table in server["tables"].items()}
        for table in tables:
            if table not in known:
                raise FleetError(f"no table '{table}' on {endpoints[0]}; there are: {', '.join(known) or 'none'}")
        wanted = tables or [name for name, is_dense in known.items() if not is_dense]
        summaries = {table: _summary(client, table, top) for table in wanted} if histograms or top else {}
    if as_json:
        found = {
            "servers": dict(zip(endpoints, servers, strict=True)),
            **({"summaries": summaries} if summaries else {}),
        }
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    _print(endpoints, servers)
    for table, summary in summaries.items():
        print_summary(table, summary, histograms, top)


def _summary(client: Client, table: str, top: int) -> dict[str, Any]:
    summaries = client.inspect(table, top)  # one per server
    num_candidates = sum(summary.get("candidates", 0) for summary in summaries)
    return {**merged(summaries, top), "candidates": num_candidates}


def _print(endpoints: list[str], servers: list[dict[str, Any]]) -> None:
    for endpoint, server in zip(endpoints, servers, strict=True):
        counts = ", ".join(f"{server[name]:,} {name}" for name in ("requests", "errors", "clients"))
        say(f"{endpoint}: up for {server['uptime']:,.0f} s, {counts}, model {server['model'] or '-'}")
    headings = ["server", "table", "kind", "rows", "bytes", "candidates", "evicted", "steps"]
    lines = [
        [endpoint, name, table["kind"], table["rows"], table["bytes"], table.get("candidates", "-"),
         table.get("evicted", "-"), table["step"]]
        for endpoint, server in zip(endpoints, servers, strict=True)
        for name, table in server["tables"].items()
    ]  # fmt: skip
    print_table(headings, lines, ("server", "table", "kind"))
