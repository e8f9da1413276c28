"""Starts a script or a function as a job on Ray from Python."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torchfleet.base.errors import FleetError, RoleError
from torchfleet.launch.cli import check, options_from
from torchfleet.launch.clusters.job_options import job_spec_of
from torchfleet.launch.clusters.on_ray.ray_cluster import require_ray
from torchfleet.launch.clusters.ray_launcher import run as run_on_ray
from torchfleet.launch.launchers import LAUNCHERS, launcher_of

_CALLED = "torchfleet.launch.clusters.on_ray.called"  # the module that calls a function in a process of the job


def run(
    what: str | Path | Callable[..., Any],
    *arguments: Any,
    server_num: int = 1,
    worker_num: int = 1,
    address: str = "auto",
    **options: Any,
) -> Any:
    """Run a script, or call a function, in every process of a job on Ray. Blocks until the job has ended.

    A script: `arguments` are its command-line arguments. Returns the exit status, as fleetrun does.
    A function: every process, servers included, calls it with `arguments`, just as it would run a script. Returns the
    value that the function returns on worker 0. Raises FleetError if the job fails. Ray serializes the function, its
    arguments and its result: a function of a module that the nodes have by name, a function of a notebook by value.

    `address`: of the cluster; "local" for one on this machine. A connection made by ray.init takes precedence.
    `options`: options of fleetrun, by name: worker_cpus=2, max_restart=3, insecure=True, nproc_per_node=4.
    """
    is_function = callable(what)
    script = ["-m", _CALLED] if is_function else [str(what), *map(str, arguments)]
    counts = {} if "nproc_per_node" in options or "nnodes" in options else _counts(server_num, worker_num)
    given = options_from("fleet.ray.run", {"cluster": f"ray={address}", **counts, **options}, script)
    if launcher_of(given) is not LAUNCHERS["ray"]:
        raise RoleError(f"fleet.ray.run: these options are not for Ray: {', '.join(options)}")
    check(given)
    function = bytes(_pickle().dumps((what, arguments))) if is_function else b""
    code, result = run_on_ray(job_spec_of(given), given, function)
    if not is_function:
        return code
    if code == 130:
        raise KeyboardInterrupt
    if code != 0:
        raise FleetError(f"the job ended with exit status {code}; its logs are in {given.log_dir}/latest")
    return _pickle().loads(result)


def _counts(server_num: int, worker_num: int) -> dict[str, int]:
    return {"server_num": server_num, "worker_num": worker_num}


def _pickle() -> Any:
    """Return Ray's pickle module, with which Ray sends objects between its processes."""
    require_ray()
    return import_module("ray.cloudpickle")
