"""The metrics port of each process, and the list of targets for Prometheus."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.prometheus.metrics_port import HOST, PORT
from torchfleet.observe.watch.watchers import Watching

TARGETS = "prometheus_targets.json"  # in the folder of a run
_MOST = 1 << 16
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def port_variables(watching: Watching, number: int) -> dict[str, str]:
    """The variables of process `number` of this machine; none without --metrics_port. Raises RoleError."""
    if watching.metrics_port is None:
        return {}
    port = watching.metrics_port + number
    if port >= _MOST:
        raise RoleError(
            f"--metrics_port {watching.metrics_port}: process {number} would have port {port}, and ports end at "
            f"{_MOST - 1}. Give a smaller one."
        )
    return {PORT: str(port), HOST: watching.metrics_host}


def check_free(watching: Watching, num: int) -> None:
    """Raise RoleError if one of these ports is in use: a process would fail later."""
    for number in range(num if watching.metrics_port is not None else 0):
        found = port_variables(watching, number)
        family = socket.AF_INET6 if ":" in watching.metrics_host else socket.AF_INET
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((watching.metrics_host, int(found[PORT])))
            except OSError as error:
                raise RoleError(
                    f"--metrics_port: {place_of(found)}, the port of process {number}, cannot be used: {error}. Give "
                    "another --metrics_port, or end what has it."
                ) from None


def place_of(variables: Mapping[str, str]) -> str:
    """host:port of a process with such variables, as this machine reaches it."""
    host = _EVERYWHERE.get(variables[HOST], variables[HOST])
    return f"[{host}]:{variables[PORT]}" if ":" in host else f"{host}:{variables[PORT]}"


def served_on(host: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process on machine `host`; a port open to other machines gets the address that they use."""
    return {**variables, **({HOST: host} if variables.get(HOST) in _EVERYWHERE else {})}


def tell_targets(run_dir: Path, processes: Mapping[str, Mapping[str, str]]) -> str:
    """Write the list that Prometheus' file_sd_configs read; returns a line for people, empty without ports.

    `processes`: the variables of each, by its name.
    """
    places = {name: place_of(variables) for name, variables in processes.items() if PORT in variables}
    if not places:
        return ""
    groups = [{"targets": list(places.values()), "labels": {"run": run_dir.name}}]
    try:
        (run_dir / TARGETS).write_text(json.dumps(groups, indent=1))
    except OSError as error:
        raise RoleError(f"cannot write {run_dir / TARGETS}, the list of metrics ports: {error}") from None
    told = ", ".join(f"{name} at {place}" for name, place in places.items())
    return f"metrics: {told}; all of them in {run_dir / TARGETS}"
