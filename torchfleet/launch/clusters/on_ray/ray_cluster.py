"""Connects to a Ray cluster, sends the script's files to its nodes, and places actors in placement groups."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.errors import RoleError
from torchfleet.base.extras import required
from torchfleet.launch.clusters.on_ray.package import package, tell
from torchfleet.launch.clusters.on_ray.ray_node import Look, Node, Work
from torchfleet.launch.clusters.on_ray.ray_task import NodeLost
from torchfleet.launch.clusters.sent_files import SentFile
from torchfleet.launch.job_spec import JobSpec, Report, Resources

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit` for its entry point
_CALLS = 4  # concurrent calls of an actor: one polls, others send signals and addresses
_ANSWER = 10.0  # seconds that an actor has to answer
_FIRST_ANSWER = 300.0  # seconds that an actor has to start: its node may have to unpack the script's folder
_PARTING = 3.0  # seconds that an actor has to end: an actor whose node is lost never answers
_ROOM = 1800.0  # seconds that a job waits for resources of the cluster
_TELL = 5.0  # seconds between two checks for missing resources


def require_ray() -> Any:
    """Return the module `ray`. Raises MissingPackage if it is not installed."""
    return required("ray", "--cluster ray", "ray", ", on every node of the cluster")


Files = tuple[list[SentFile], dict[str, str]]  # what is sent; what is named in sources and is not sent


@contextlib.contextmanager
def connected(address: str, job: JobSpec, num_cores: int, files: Callable[[], Files], say: Report) -> Iterator[Path]:
    """Connect to the cluster at `address` ("auto": the cluster that Ray finds; "local": a new one on this machine, with
    room for `num_cores` even if the machine has fewer: its processes then share cores, as local processes do).

    Sends the files that `files` returns, unless Ray has sent a folder, and lists them. Yields the local folder that
    corresponds to the actors' working directory. An existing connection is used, and stays open.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield Path.cwd()
        return
    _require_answer(address)
    own = {"num_cpus": max(num_cores, usable_cores())} if address == "local" else {}
    with contextlib.ExitStack() as stack:
        # None, not an empty runtime_env: that would replace the job's runtime_env and drop its working directory.
        environment = None
        if not is_sent_by_job():
            sent, left = files()
            tell(sent, left, say)
            environment = {"working_dir": str(stack.enter_context(package(job.folder, sent)))} if sent else None
        try:
            ray.init(address, runtime_env=environment, log_to_driver=False, logging_level="ERROR", **own)
        except Exception as error:
            raise RoleError(_why_not(ray, address, job.folder, error)) from None
        stack.callback(ray.shutdown)
        yield Path.cwd() if is_sent_by_job() else job.folder


def is_sent_by_job() -> bool:
    """Whether `ray job submit --working-dir` sent the working directory of this process to the nodes."""
    config = json.loads(os.environ.get(_JOB_CONFIG) or "{}")
    return bool((config.get("runtime_env") or {}).get("working_dir"))


def _require_answer(address: str) -> None:
    """Raise RoleError if no server listens at this host:port: Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()
    except (OSError, ValueError) as error:
        raise RoleError(_not_there(address, str(error))) from None


def _not_there(address: str, why: str) -> str:
    return (
        f"--cluster ray={address}: no cluster of Ray is there ({why}). Start one with `ray start --head`, name another "
        "(ray=host:6379), or try it on this machine alone: ray=local"
    )


def _why_not(ray: Any, address: str, folder: Path, error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ConnectionError):
        return _not_there(address, text)
    if isinstance(error, getattr(ray.exceptions, "AuthenticationError", ())):
        return (
            f"--cluster ray={address}: the cluster asks for a token ({text}). Copy ~/.ray/auth_token of its head node "
            "here, with mode 0600, or name it in RAY_AUTH_TOKEN_PATH"
        )
    if "working_dir" in str(error) or "package" in str(error).lower():
        return (
            f"the files of the script's folder, {folder}, cannot be sent to the nodes of Ray: {text}. Keep data and "
            "models somewhere else"
        )
    return f"--cluster ray={address}: {type(error).__name__}: {text}"


class RayNode:
    """The handle of an actor. Implements NodeHandle."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._ray = require_ray()
        self._actor = self._ray.remote(Node).options(max_concurrency=_CALLS, **options).remote()

    def place(self) -> str:
        """Return host:port of a port that the actor reserved. Blocks until Ray has started the actor."""
        return str(self._answer(self._actor.place.remote(), _FIRST_ANSWER))

    def start(self, work: Work) -> int:
        return int(self._answer(self._actor.start.remote(work), _ANSWER))

    def look(self, timeout: float) -> Look:
        found: Look = self._answer(self._actor.look.remote(timeout), timeout + _ANSWER)
        return found

    def move(self, moved: dict[str, str]) -> None:
        self._actor.move.remote(moved)

    def signal(self, number: int) -> None:
        self._actor.signal.remote(number)

    def kill(self) -> None:
        self._answer(self._actor.kill.remote(), _ANSWER)

    def result(self) -> bytes:
        return bytes(self._answer(self._actor.result.remote(), _ANSWER))

    def end(self) -> None:
        with contextlib.suppress(NodeLost):
            self._answer(self._actor.close.remote(), _PARTING)
        self._ray.kill(self._actor)

    def _answer(self, asked: Any, timeout: float) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(asked, timeout=timeout)
        except errors.RayTaskError as error:
            raise error.cause from None
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            raise NodeLost(_first_lines(str(error))) from None


def _first_lines(text: str) -> str:
    """Return Ray's message about a lost actor without its advice."""
    return "; ".join(line.strip() for line in text.strip().splitlines()[:3])


class PlacementGroup:
    """Resources for the processes of one role, reserved until it is closed. Ray replaces the share of a lost node."""

    def __init__(self, num: int, resources: Resources, strategy: str, what: str) -> None:
        self._ray, self._what = require_ray(), what
        self._bundle = bundle_of(resources)
        self._groups = import_module("ray.util.placement_group")
        self._group = self._groups.placement_group([dict(self._bundle) for _ in range(num)], strategy=strategy)

    def wait(self, report: Report, check: Callable[[], None]) -> None:
        """Block until the cluster has reserved the resources. Tells `report` what is missing when that has changed.

        Raises RoleError after _ROOM seconds, and the errors of `check`, which it calls every _TELL seconds.
        """
        deadline, told = time.monotonic() + _ROOM, ""
        while not self._group.wait(_TELL):
            check()
            free, whole = self._ray.available_resources(), self._ray.cluster_resources()
            names = sorted({*self._bundle, "CPU"})
            has = ", ".join(f"{free.get(name, 0):g} of {whole.get(name, 0):g} {name}" for name in names)
            text = f"{self._what} need {_spelled(self._bundle)} each; the cluster has {has} free"
            if time.monotonic() > deadline:
                raise RoleError(f"no room in the cluster for {_ROOM:g} s: {text}")
            if text != told:
                report(f"[fleetrun] waiting for room in the cluster: {text}")
                told = text

    def actor(self, number: int, is_restarted: bool) -> RayNode:
        """Create an actor in bundle `number`. `is_restarted`: Ray restarts it on another node if its node is lost."""
        kind = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        asked = self._bundle
        return RayNode(
            {
                "scheduling_strategy": kind(self._group, placement_group_bundle_index=number),
                "num_cpus": asked["CPU"],
                "num_gpus": asked.get("GPU", 0),
                "memory": asked.get("memory"),
                "max_restarts": -1 if is_restarted else 0,
            }
        )

    def close(self) -> None:
        self._groups.remove_placement_group(self._group)


def bundle_of(resources: Resources) -> dict[str, float]:
    """Return the resources that one process requests from Ray: one core by default."""
    found = {"CPU": 1.0 if resources.cpus is None else resources.cpus}
    if resources.memory is not None:
        found["memory"] = resources.memory
    if resources.gpus is not None:
        found["GPU"] = resources.gpus
    return found


def _spelled(bundle: dict[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in bundle.items())


def relative(command: Sequence[str], script: Path | None, folder: Path) -> tuple[tuple[str, ...], str]:
    """Return the command for the nodes, without the interpreter, and the script that they need ("" for a module)."""
    if script is None:
        return tuple(command[1:]), ""
    inside = os.path.relpath(script, folder)
    name = str(script) if inside.startswith("..") else inside
    return (name, *command[2:]), name
