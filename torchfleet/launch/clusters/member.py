"""Runs one role of a job in the foreground, for schedulers that start every process themselves.

python -m torchfleet.launch.clusters.member [-m] SCRIPT ARGUMENTS

The environment defines the role (docs/launch.md, "Under a scheduler"). A member does not wait for other members: roles
start in any order. The process exits with the status of the script, with 2 for an invalid environment, for which a
retry would fail again, or with 128 + N for signal N.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.command_line import Parser
from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.monitor.json_lines import MOST, JsonLog, log_format
from torchfleet.base.printable import say
from torchfleet.base.role.fleet_role import ASK
from torchfleet.base.role.role_info import SERVER, RoleInfo
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.launch.clusters.foreground import Ending, asks_blocked, run_child
from torchfleet.launch.clusters.health import HealthPort
from torchfleet.launch.endurance.starting import Starting
from torchfleet.launch.processes import module_command, script_command
from torchfleet.launch.server_command import server_command
from torchfleet.launch.server_nursery import TIE_TO_PARENT
from torchfleet.launch.surroundings import ROLES
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.net.wire import Role

GROUP, INDEX, GRACE, PORT = "FLEET_GROUP", "FLEET_INDEX", "FLEET_GRACE", "FLEET_HEALTH_PORT"
_INDEXES = (INDEX, "JOB_COMPLETION_INDEX")  # an Indexed Job of Kubernetes sets the second
_GROUPS = ("server", "worker")
_MOST_SECONDS = 24 * 3600.0
_PERIOD = 5.0  # seconds between two messages about a host name that does not resolve yet
# Variables that a scheduler may set, although the processes of a launcher do not inherit them.
_KEPT = ("FLEET_RESTART", "FLEET_MAX_RESTART", "FLEET_REPLICA", "FLEET_WORKER_ENDPOINTS")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script in the role that the environment defines, and return its exit status."""
    parser = Parser(prog="python -m torchfleet.launch.clusters.member", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-m", "--module", action="store_true", help="what follows is a module")
    parser.add_argument("script", help="the training script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    command = (module_command if options.module else script_command)(options.script, options.arguments)
    try:
        if not options.module and not Path(options.script).is_file():
            raise RoleError(f"no script at {options.script}")
        return _run(command, options)
    except FleetError as error:
        say(f"fleetrun: {error}", file=sys.stderr)
        return 2


def member_environment(found: Mapping[str, str]) -> dict[str, str]:
    """Convert a scheduler's variables into the variables of a role. Raises RoleError."""
    group = found.get(GROUP, "")
    if group not in _GROUPS:
        raise RoleError(f"{GROUP} must be one of {', '.join(_GROUPS)}; found {group!r}")
    index = next((found[name] for name in _INDEXES if found.get(name)), None)
    if index is None:
        raise RoleError(f"{GROUP}={group} is set, but its number is missing: set {' or '.join(_INDEXES)}")
    kept = {name: value for name, value in found.items() if name not in ROLES or name in _KEPT}
    kept |= {"FLEET_ROLE": group.upper(), f"FLEET_{group.upper()}_INDEX": index, "PYTHONUNBUFFERED": "1"}
    kept.setdefault("OMP_NUM_THREADS", "1" if group == SERVER else str(usable_cores()))
    kept.setdefault("FLEET_RESTART", ASK)  # if the scheduler does not set it, the servers know it
    return kept


def read_role(environment: Mapping[str, str]) -> RoleInfo:
    """Read the role from an environment. Raises RoleError if it is invalid, SecurityError if its keys are missing."""
    info = PaddleCloudRoleMaker(environment=environment).read()
    if info.key_dir:
        KeyFolder(info.key_dir)
    return info


def seconds_of(name: str, found: Mapping[str, str]) -> float:
    """Return a variable as a number of seconds; 0 if it is not set."""
    text = found.get(name) or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_SECONDS:
        raise RoleError(f"{name} must be a number of seconds from 0 to {_MOST_SECONDS:g}, found {text!r}")
    return seconds


def wait_for_own_name(host: str, seconds: float) -> None:
    """Block until a server's own host name resolves: a scheduler may publish it after the process has started.

    Raises RoleError after `seconds`.
    """
    started = time.monotonic()
    next_line = started + _PERIOD
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            now = time.monotonic()
            if now - started >= seconds:
                raise RoleError(
                    f"this server's own name {host} is not known after {seconds:g} s (FLEET_START_TIMEOUT): {error}. "
                    "Is it the name that FLEET_SERVER_ENDPOINTS has for it, and does the name service have it?"
                ) from None
            if now >= next_line:
                next_line = now + _PERIOD
                print(f"waiting for this server's own name {host}: {error}, {now - started:.0f} s", flush=True)
            time.sleep(0.2)


class Child:
    """A script that writes to the output of this process; with `json`, as JSON lines with its role and index."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], json: tuple[str, int] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TIE_TO_PARENT, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if json is None else subprocess.PIPE,
            stderr=None if json is None else subprocess.STDOUT,
            start_new_session=True,
        )
        self._copying: threading.Thread | None = None
        if json is not None:
            self._copying = threading.Thread(target=self._copy, args=json, daemon=True)
            self._copying.start()

    def finish(self) -> None:
        """Call after the script has ended. Blocks until all of its output is written."""
        if self._copying is not None:
            self._copying.join(timeout=10)

    def _copy(self, role: str, index: int) -> None:
        assert self._process.stdout
        log = JsonLog(_to_stdout, role, index)
        with self._process.stdout as stream:
            while data := os.read(stream.fileno(), MOST):
                log.write(data)
        log.end()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid


def _run(command: Sequence[str], options: argparse.Namespace) -> int:
    environment = member_environment(os.environ)
    info = read_role(environment)
    if info.role == SERVER:
        bare, told = server_command(options.script, options.arguments, options.module)
        command = bare or command
        for line in told:
            say(f"fleetrun: {line}")
    ending = Ending(seconds_of(GRACE, os.environ))
    port = _port(os.environ.get(PORT) or "0")
    index = info.server_index if info.role == SERVER else info.worker_index
    json = (info.role, index) if log_format() == "json" else None
    with tempfile.TemporaryDirectory(prefix="fleet-member-") as folder:  # of mode 0700
        status_file = Path(folder) / "status"
        with HealthPort(port, status_file, info.role == SERVER) as health:
            if info.role == SERVER:
                wait_for_own_name(info.replica_places[info.replica].rpartition(":")[0].strip("[]"), info.start_timeout)
            with asks_blocked():
                child = Child(command, {**environment, "FLEET_STATUS_FILE": str(status_file)}, json)
                health.watch(child)
                status = run_child(child, ending, _telling(info, environment, status_file))
                child.finish()
                return status


def _telling(info: RoleInfo, environment: Mapping[str, str], status_file: Path) -> Callable[[], None]:
    """Return what a member does while its script runs: tell the servers of a worker that has not joined yet, which may
    take the place of one that was lost."""
    if info.role == SERVER or info.is_local:
        return lambda: None
    role = Role.WORKER if info.worker_index else Role.FIRST_WORKER
    way = Way(info.key_dir, info.socket_dir, info.address_book)
    starting = Starting(way, info.server_endpoints, role, environment)
    return lambda: starting.look([] if status_file.exists() else [(info.worker_index, info.restart)])


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise RoleError(f"{PORT} must be a port from 1 to 65535, or 0 for none; found {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
