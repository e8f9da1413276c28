"""`fleet stats`: what running servers hold and do, at a glance."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from torchfleet.base.errors import FleetError, ServerUnreachable
from torchfleet.base.monitor.bottleneck import bottleneck
from torchfleet.base.printable import say
from torchfleet.observe.commands.drawing import print_table
from torchfleet.observe.dashboard.run_folders import RunFolders
from torchfleet.observe.watch.history import HistoryReader
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import way_in
from torchfleet.ps.net.probe import mechanism_at
from torchfleet.ps.net.replica_channels import SEPARATOR
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

_PATIENCE = Patience(timeout=5.0)


def show_stats(asked: str, key_dir: str | None, as_json: bool) -> None:
    """Print tables, requests and workers of servers. `asked`: host:port, separated by commas, or the folder of a run
    that has not ended, or the --log_dir that holds it.
    """
    endpoints = servers_of_run(Path(asked)) if os.path.isdir(asked) else list(map(endpoint_of, asked.split(",")))
    reached, key_dir = way_in(endpoints, key_dir)
    for endpoint in reached:
        _expect_server(endpoint, bool(key_dir))
    keys = KeyFolder(key_dir) if key_dir else None
    with Client.connect(reached, keys, patience=_PATIENCE) as client:
        try:
            servers = client.stats()
        except ServerUnreachable as error:
            hint = f" It does ask for keys: are those in {key_dir} its own?" if key_dir else ""
            raise ServerUnreachable(f"{error}{hint}") from None
    if as_json:
        found = {"servers": dict(zip(endpoints, servers, strict=True))}
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    _print(endpoints, servers)


def servers_of_run(folder: Path) -> list[str]:
    """Return the addresses of the running servers in a run's record, without backups. Raises FleetError if no server
    is running."""
    runs = RunFolders([folder])
    (run_dir,) = runs.folders(runs.names()[0]) or []
    found: dict[str, dict[str, Any]] = {}  # the last record of every server
    for record in HistoryReader(run_dir).records():
        if record["kind"] in ("start", "end"):  # of the job, or of one attempt to run it
            found.clear()
        elif record["kind"] == "role" and record.get("role") == "server":
            found[record["key"]] = record
    ordered = sorted(found.values(), key=lambda record: (record["index"], record["replica"]))
    running = [record["status"] for record in ordered if record["state"] == "running"]
    addresses = [status["address"] for status in running if "address" in status and not status.get("backup")]
    if not addresses:
        raise FleetError(
            f"no server is running in {run_dir}: expected the folder of a job with servers that has not ended. What is "
            f"left of one that has ended is shown by `fleet dashboard {folder}`."
        )
    return addresses


def endpoint_of(address: str) -> str:
    """Convert host:port to tcp://host:port; tcp:// and ipc:// stay unchanged. Converts all addresses of replicas."""
    address = address.strip()
    if SEPARATOR in address:
        return SEPARATOR.join(map(endpoint_of, address.split(SEPARATOR)))
    if "://" in address:
        return address
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise FleetError(
            "expected host:port of a server, or several with commas between, or the folder of logs of a job that is "
            f"running, such as log/latest; found {address!r}"
        )
    return f"tcp://{address}"


def _expect_server(endpoint: str, has_keys: bool) -> None:
    """Report at once what is wrong with an address, instead of a timeout without a reason."""
    if not endpoint.startswith("tcp://") or SEPARATOR in endpoint:  # one of two replicas may be down
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    found = mechanism_at(host.strip("[]"), int(port)) if port.isdigit() else None
    if found is None:
        raise ServerUnreachable(
            f"nothing listens at {endpoint}: is the server running, and is this its port? fleetrun prints the "
            "addresses with --dry_run, and a running server's is FLEET_SERVER_ENDPOINTS in its environment."
        )
    if found not in ("NULL", "CURVE"):
        raise ServerUnreachable(f"what listens at {endpoint} is no torchfleet server: is this the right port?")
    if found == "CURVE" and not has_keys:
        raise FleetError(f"the server at {endpoint} asks for keys: give their folder with --key_dir DIR")
    if found == "NULL" and has_keys:
        raise FleetError(f"the server at {endpoint} runs without keys: leave --key_dir (FLEET_KEY_DIR) out")


def _print(endpoints: list[str], servers: list[dict[str, Any]]) -> None:
    for endpoint, server in zip(endpoints, servers, strict=True):
        counts = ", ".join(f"{server[name]:,} {name}" for name in ("requests", "errors", "clients"))
        workers = ", ".join(map(_worker, server["workers"])) or "none"
        busy = "" if server["busy"] is None else f", computing {server['busy']:.0%} of the time"
        say(f"{endpoint}: up for {server['uptime']:,.0f} s{busy}, {counts}; workers: {workers}")
    if told := _bottleneck(servers):
        print(told)
    lines = [
        [endpoint, name, table["kind"], *_sizes(table), table["bytes"], table["step"], _staleness(table["staleness"])]
        for endpoint, server in zip(endpoints, servers, strict=True)
        for name, table in server["tables"].items()
    ]
    headings = ["server", "table", "kind", "rows", "elements", "bytes", "updates", "staleness (updates: pushes)"]
    print_table(headings, lines, ("server", "table", "kind", headings[-1]))


def _worker(line: dict[str, Any]) -> str:
    """Describe a worker: when it joined, and whether it is still alive."""
    lost = f", lost: silent for {line['silent']:.0f} s" if line["is_lost"] else ""
    return f"{line['worker']} ({line['place']}, joined {line['age']:,.0f} s ago{lost})"


def _bottleneck(servers: list[dict[str, Any]]) -> str:
    """Return what the job waits for, from the reports of all servers; each of them knows all workers."""
    busy = [server["busy"] for server in servers if server["busy"] is not None]
    waits = [line["waiting"] for line in servers[0]["workers"] if line["waiting"] is not None]
    return bottleneck(busy, waits, None)


def _sizes(table: dict[str, Any]) -> tuple[object, object]:
    """Rows, and elements: a dense table has no rows."""
    return ("-", table["rows"]) if table["is_dense"] else (table["rows"], "-")


def _staleness(counts: dict[int, int]) -> str:
    return ", ".join(f"{age}: {num:,}" for age, num in sorted(counts.items())) or "-"
