"""A script or a function as a job on Ray, started from Python."""

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
    """Run a script, or call a function, in every process of a job on Ray. Waits for its end.

    A script: `arguments` are those of its command line. Returns the exit status, as fleetrun does.
    A function: it is called with `arguments` by every process, servers too, as a script would be run there. Returns
    what it returns on worker 0. Raises FleetError if the job fails. It travels by Ray's own serialization, as do its
    arguments and its result: a function of a module that the nodes have goes by its name, one of a notebook as it is.

    `address`: of the cluster; "local" for one on this machine. A connection that ray.init has made is used instead.
    `options`: those of fleetrun, by their names: worker_cpus=2, max_restart=3, insecure=True, nproc_per_node=4.
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
    """Ray's own way to send objects between its processes."""
    require_ray()
    return import_module("ray.cloudpickle")
