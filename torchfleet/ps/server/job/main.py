"""The command line of a stand-alone server: `python -m torchfleet.server --endpoint tcp://127.0.0.1:7000`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torchfleet.base.command_line import Parser
from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.role.process_settings import (
    DURABILITY,
    FSYNC,
    LOG_STORE,
    MIN_WORKERS,
    OF_JOB,
    ON_LOSS,
    loss_of,
    process_settings,
)
from torchfleet.base.role.role_info import LOSS_RULES, SETTINGS
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.server.job import bare_server
from torchfleet.ps.server.job.server_run import Place, ServerRun
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.read_only import serve_saved, shard_of
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.storage import tier_variables
from torchfleet.ps.tables.settings.table_size import parse_bytes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m torchfleet.server",
        description="Run one parameter server. It prints the address it listens on and serves until it is told to stop "
        "(by a client with the launcher's role, or by SIGTERM / Ctrl-C). Several servers on one machine use its cores.",
        epilog=f"{OF_JOB}, as the first option: be the server of a job that the environment describes, as "
        "fleetrun starts it; worker 0 says which tables it has.",
    )
    parser.add_argument(
        "--endpoint", default="tcp://127.0.0.1:0", help="tcp://HOST:PORT (port 0: any free one) or ipc://PATH"
    )
    parser.add_argument(
        "--key_dir", default=os.environ.get("FLEET_KEY_DIR") or None, help="folder of keys; needed off loopback"
    )
    parser.add_argument("--insecure", action="store_true", help="serve other machines without keys: anyone may connect")
    parser.add_argument(
        "--max_table_bytes",
        metavar="SIZE",
        help="largest size of one table, such as 8GB (default: FLEET_MAX_TABLE_BYTES, else all memory of the machine "
        "or container)",
    )
    parser.add_argument(
        "--table_memory",
        metavar="SIZE",
        help="keep the rows used last of each table in this much memory, such as 8GB, and the others on disk; needs "
        "--table_path (default: FLEET_TABLE_MEMORY, else all rows are in memory)",
    )
    parser.add_argument(
        "--table_path",
        metavar="DIR",
        help="folder on a fast local disk for the rows that do not fit --table_memory (default: FLEET_TABLE_PATH)",
    )
    parser.add_argument(
        "--read_only",
        metavar="MODEL",
        help="serve the rows of this saved model, a folder or URL, and refuse every change (fleet serve --shards)",
    )
    parser.add_argument(
        "--shard",
        metavar="K/N",
        help="with --read_only: serve shard K of N of every table, such as 0/4 (default: 0/1, all rows)",
    )
    parser.add_argument(
        "--save_root",
        action="append",
        metavar="DIR",
        help="write saves below this folder or URL only; may be given several times (default: FLEET_SAVE_ROOTS, else "
        "wherever worker 0 has made the folder of its save)",
    )
    parser.add_argument(
        "--orphan_timeout",
        type=float,
        metavar="SECONDS",
        help="end after this time without a sign of a worker, once one was there (default: 1800 with --num_workers; "
        "0: never)",
    )
    parser.add_argument(
        "--durability",
        choices=SETTINGS,
        help="log: every change is on disk before it is answered, and a server that is started again goes on with it "
        "(default: FLEET_DURABILITY, else none)",
    )
    parser.add_argument(
        "--log_store",
        metavar="DIR",
        help="folder of the log, of this server alone (default: FLEET_LOG_STORE)",
    )
    parser.add_argument(
        "--fsync_ms",
        type=float,
        metavar="MS",
        help="changes that a loss of power may take, in milliseconds; 0: none, every answer waits for the disk "
        "(default: FLEET_FSYNC_MS, else 10)",
    )
    parser.add_argument(
        "--num_workers", type=int, default=0, help="stop after this number of workers has left (0: never)"
    )
    parser.add_argument(
        "--min_workers",
        type=int,
        help="number of workers with which an elastic job begins; more may join and leave (default: "
        "FLEET_MIN_WORKERS, else 0: wait for all workers)",
    )
    parser.add_argument(
        "--on_worker_loss",
        choices=LOSS_RULES,
        help="what happens when a worker is lost that others wait for (default: FLEET_ON_WORKER_LOSS, else end; "
        "go_on where workers come and go)",
    )
    return parser.parse_args(arguments)


def _table_bytes(options: argparse.Namespace) -> int | None:
    return None if options.max_table_bytes is None else parse_bytes(options.max_table_bytes, "--max_table_bytes")


def _orphan_timeout(options: argparse.Namespace) -> float | None:
    seconds: float | None = options.orphan_timeout
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise FleetError(f"--orphan_timeout must be a number of seconds, 0 for never; found {seconds}")
    return seconds


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of lost workers and of the log: from the options, else from the environment. Raises
    RoleError for invalid ones, and for options about a log that is not kept."""
    given = {
        MIN_WORKERS: options.min_workers, ON_LOSS: options.on_worker_loss,
        DURABILITY: options.durability, LOG_STORE: options.log_store, FSYNC: options.fsync_ms,
    }  # fmt: skip
    found = {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}
    settings = {**process_settings(found), **loss_of(found, options.num_workers)}
    if settings["durability"] == "none":
        for option, value in (("--log_store", options.log_store), ("--fsync_ms", options.fsync_ms)):
            if value is not None:
                raise RoleError(f"{option} is about the log of this server, and there is none: add --durability log")
    elif settings["log_store"] is None:
        raise RoleError("--durability log needs a folder for the log: give --log_store DIR, or FLEET_LOG_STORE")
    return settings


def _check_read_only(options: argparse.Namespace, durability: str) -> None:
    if options.read_only is None and options.shard is not None:
        raise FleetError(f"--shard {options.shard} needs --read_only MODEL: servers of a job get their shard from it")
    training = {"--durability log": durability == "log", "--num_workers": options.num_workers > 0}
    other = next((name for name, is_given in training.items() if is_given), None)
    if options.read_only is not None and other:
        raise FleetError(f"--read_only and {other} contradict: nothing is trained on a read-only server. Leave one out")


def _begin(options: argparse.Namespace) -> ServerRun:
    """Make the server. It listens and is ready to serve."""
    settings = _settings(options)
    _check_read_only(options, settings["durability"])
    loss = {name: settings[name] for name in ("min_workers", "on_worker_loss")}
    os.environ.update(tier_variables(options.table_memory, options.table_path))
    server = Server(_table_bytes(options), options.num_workers, options.save_root, _orphan_timeout(options), **loss)
    log = None
    if settings["durability"] == "log":
        log = partial(Durability, Path(settings["log_store"]), settings["fsync_ms"])
    run = ServerRun(server, Place(), log)
    run.end_on(signal.SIGTERM, signal.SIGINT)
    run.restore()
    if options.read_only is not None:
        shard, num_shards = shard_of(options.shard or "0/1")
        num_rows = serve_saved(server, options.read_only, shard, num_shards)
        run.say(f"serves {num_rows:,} rows of {options.read_only}, shard {shard} of {num_shards}, read-only")
    run.begin_log()
    run.warm_up()
    run.listen(options.endpoint, KeyFolder(options.key_dir) if options.key_dir else None, options.insecure)
    run.open_status()
    return run


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [OF_JOB]:
        return bare_server.main(given[1:])
    options = parse(given)
    try:
        run = _begin(options)
    except FleetError as error:
        return _fail(error, 2)
    assert run.listener is not None
    print(f"listening on {run.listener.endpoint}", flush=True)
    try:
        run.serve()
    except FleetError as error:
        return _fail(error, 1)
    return 0


def _fail(error: FleetError, status: int) -> int:
    print(f"torchfleet server: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
