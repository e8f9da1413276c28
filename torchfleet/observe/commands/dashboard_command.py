"""`fleet dashboard`: the web page of a job that runs or has ended, from the folders of its logs."""

from __future__ import annotations

import argparse
import signal
import threading
from types import FrameType

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.host_names import is_loopback
from torchfleet.base.printable import say
from torchfleet.observe.dashboard.access import token_of
from torchfleet.observe.dashboard.dashboard_server import DEFAULT_PORT, Dashboard
from torchfleet.observe.dashboard.run_folders import RunFolders
from torchfleet.observe.dashboard.served_models import ServedModels
from torchfleet.observe.watch.watchers import port_or_any


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dashboard",
        help="a web page of a job: charts, tables, logs",
        description="Serve a web page of a job that runs or has ended, until Ctrl-C.",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="LOG_DIR",
        help="the folder of a run, such as log/latest; or the --log_dir of fleetrun, to choose among its runs; or "
        "several folders, which are the machines of one job",
    )
    parser.add_argument(
        "--compare",
        metavar="LOG_DIR",
        help="the folder of another run, or a --log_dir, whose newest run is taken: its throughput and metrics are "
        "drawn beside, by the time since its start",
    )
    parser.add_argument("--port", type=port_or_any, help=f"default: {DEFAULT_PORT}, or the next that is free; 0: any")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1, this machine alone)")
    parser.add_argument(
        "--served",
        action="append",
        default=[],
        metavar="URL",
        help="a model that fleet serve serves: http://HOST:PORT/v2/models/NAME, as it prints; may be repeated",
    )
    parser.add_argument("--served_token_file", metavar="FILE", help="a file with the token that these ask for")
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--token_file",
        metavar="FILE",
        help="a file with the token, which is made if it is not there (default: a random token, in the address)",
    )
    token.add_argument(
        "--no_token", action="store_true", help="let every user of this machine see the page; on loopback alone"
    )
    parser.set_defaults(run=_dashboard)


def _dashboard(options: argparse.Namespace) -> int:
    folders = RunFolders(options.folders, options.compare)
    token = None if options.no_token else token_of(options.token_file)
    served = ServedModels(options.served, _served_token(options))
    asked = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        asked.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    dashboard = Dashboard(folders, options.host, options.port, token, served)
    try:
        say(f"dashboard: {dashboard.url}")
        if not is_loopback(options.host):
            say("What is sent is not encrypted. On a network that others use, leave --host out and take an ssh tunnel.")
        asked.wait()
    finally:
        dashboard.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _served_token(options: argparse.Namespace) -> str:
    if not options.served_token_file:
        return ""
    if not options.served:
        raise FleetError("--served_token_file is for models that are served: add --served URL")
    try:
        with open(options.served_token_file, encoding="ascii") as file:
            return file.read(4097).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"--served_token_file {options.served_token_file} cannot be read: {error}") from None
