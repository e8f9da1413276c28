"""Runs a function of a notebook as a job on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torchfleet.base.errors import FleetError, RoleError
from torchfleet.launch.cli import check, options_from
from torchfleet.launch.clusters.job_options import job_spec_of
from torchfleet.launch.handover import read_outcome, result_files, sealed_call
from torchfleet.launch.launchers import LAUNCHERS, launcher_of

_PROCESS = "torchfleet.launch.cell_process"  # the module that calls a function in a process of the job


def run(
    function: Callable[..., Any],
    server_num: int | Literal["auto"] = 1,
    worker_num: int = 1,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function in every process of a job on this machine. Blocks until the job has ended.

    Servers call the function too, just as every role runs a training script: the function calls fleet.init and
    fleet.is_server, or fleet.prepare. Returns the values that the workers returned, in worker order. A value may be
    None, a number, a string, a list, a tuple, a dictionary, a tensor or a numpy array. A worker that is still
    initialized when the function returns is stopped.

    If the function fails in a process, the job ends and this raises FleetError with that process's traceback. An
    interrupt ends all processes. The cell shows the output of worker 0 and the launcher's lines. Logs: log/latest.

    The function may be defined in the notebook: it is sent together with the variables that it uses. `options` are the
    options of fleetrun, by name: max_restart=3, log_dir="logs".
    """
    if not callable(function):
        raise FleetError(
            f"fleet.notebook.run: expected a function, found {function!r:.200}. For a script: !fleetrun train.py"
        )
    if not isinstance(args, (list, tuple)):
        raise FleetError(f"fleet.notebook.run: expected args=(...), a tuple or list, found {args!r:.200}")
    if not isinstance(worker_num, int):
        raise FleetError(f"fleet.notebook.run: expected worker_num to be a whole number, found {worker_num!r:.200}")
    script = ["-m", _PROCESS]
    given = options_from("fleet.notebook.run", {"server_num": server_num, "worker_num": worker_num, **options}, script)
    if launcher_of(given) is not LAUNCHERS["servers"] or given.servers or given.workers:
        raise RoleError(
            f"fleet.notebook.run starts servers and workers on this machine, and {', '.join(options)} ask for "
            "something else: use fleetrun, or fleet.ray.run"
        )
    check(given)
    with contextlib.ExitStack() as stack:
        num_servers = worker_num if server_num == "auto" else server_num  # "auto" starts no more servers than workers
        call = sealed_call(function, args, kwargs or {})
        stack.callback(os.close, call)
        files = stack.enter_context(result_files(worker_num + max(1, num_servers)))
        workers, servers = files[:worker_num], files[worker_num:]
        job = job_spec_of(given)
        arguments = (str(call), _listed(workers), _listed(servers))
        job = dataclasses.replace(job, command=(*job.command, *arguments), descriptors=(call, *files))
        code = LAUNCHERS["servers"].run(job, given)
        return _values(code, workers, servers, f"{given.log_dir}/latest")


def _listed(files: Sequence[int]) -> str:
    return ",".join(map(str, files))


def _values(code: int, workers: Sequence[int], servers: Sequence[int], logs: str) -> list[Any]:
    """Return the values that the workers returned, or raise the error that ended the job."""
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code > 128:
        signal.raise_signal(code - 128)  # the signal was sent to this process; the launcher ended the job first
    found = {f"worker {i}": read_outcome(file) for i, file in enumerate(workers)}
    found |= {f"server {i}": read_outcome(file) for i, file in enumerate(servers)}
    failed = [(who, outcome[1]) for who, outcome in found.items() if outcome is not None and outcome[1] is not None]
    if failed:
        who, first = min(failed, key=lambda one: one[1].time)
        raise FleetError(f"{who} failed: {first.error}\n\n{first.traceback}\nLogs are in {logs}.")
    values = [outcome[0] for who, outcome in found.items() if who.startswith("worker") and outcome is not None]
    if code != 0 or len(values) < len(workers):
        missing = ", ".join(who for who, outcome in found.items() if who.startswith("worker") and outcome is None)
        lost = f", and nothing came from {missing}" if missing else ""
        raise FleetError(f"the job ended with exit status {code}{lost}; its logs are in {logs}")
    return values
