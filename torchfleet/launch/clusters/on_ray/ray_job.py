"""One attempt to run a job on Ray: places actors, distributes their addresses, then runs the usual supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchfleet.base.errors import FleetError, RoleError
from torchfleet.launch.clusters.on_ray.ray_cluster import PlacementGroup, RayNode, bundle_of, require_ray
from torchfleet.launch.clusters.on_ray.ray_node import FUNCTION, Work, keys_for, private_folder
from torchfleet.launch.clusters.on_ray.ray_room import Share, refuse_too_large
from torchfleet.launch.clusters.on_ray.ray_task import NodeLost, RayTask
from torchfleet.launch.endurance.loss import leave_for
from torchfleet.launch.job_spec import JobSpec, Report, Task
from torchfleet.launch.processes import Output
from torchfleet.launch.roles import JobLayout, tasks
from torchfleet.launch.supervisor import JobSupervisor
from torchfleet.launch.surroundings import surroundings
from torchfleet.observe.watch.metrics_ports import port_variables, served_on, tell_targets
from torchfleet.ps.net.addresses import write_book
from torchfleet.ps.net.keys import is_private, keygen
from torchfleet.ps.net.replica_channels import SEPARATOR

# Variables that each process gets anew. Other settings of torchfleet are passed on to all.
_OWN = ("FLEET_WORKER_ENDPOINTS", "FLEET_SERVER_ENDPOINTS", "FLEET_KEY_DIR", "FLEET_STATUS_FILE", "FLEET_NUM_WORKERS",
        FUNCTION)  # fmt: skip


@dataclass(frozen=True)
class RayPlan:
    """What a job requests from the cluster. `command` and `script` are paths on the nodes."""

    command: tuple[str, ...]
    script: str
    num_servers: int = 0
    num_workers: int = 0
    replicas: int = 1
    min_workers: int = 0  # equal to num_workers unless the job is elastic
    num_machines: int = 0  # of a collective job
    ranks_per_machine: int = 0
    placement: str = "PACK"  # of workers
    server_command: tuple[str, ...] = ()  # of servers that do not need the script; empty: servers run it

    def command_of(self, role: str) -> tuple[str, ...]:
        """Return the command of a process of this role."""
        return self.server_command if role == "server" and self.server_command else self.command

    @property
    def num_ranks(self) -> int:
        return self.num_machines * self.ranks_per_machine

    @property
    def num_processes(self) -> int:
        return self.num_ranks or self.num_servers * self.replicas + self.num_workers

    @property
    def is_elastic(self) -> bool:
        return self.min_workers < self.num_workers

    def shares(self, job: JobSpec, num_workers: int) -> list[Share]:
        """What the servers and this number of workers, or the ranks, reserve."""
        counts = {"server": self.num_servers * self.replicas, "worker": num_workers, "rank": self.num_ranks}
        return [Share(num, role, bundle_of(job.resources_of(role))) for role, num in counts.items() if num]


class RayJob:
    """The actors of a job and their supervisor. `function`: the pickled function that every process calls."""

    def __init__(self, job: JobSpec, plan: RayPlan, run_dir: Path, report: Report, function: bytes = b"") -> None:
        self._job, self._plan, self._run_dir, self._report = job, plan, run_dir, report
        self._function = function
        self.is_finished = False  # every process except lost workers has ended with status 0
        self._first: RayTask | None = None  # worker 0, or rank 0
        self._lasting: list[RayTask] = []  # workers that run from the beginning
        self._stack = contextlib.ExitStack()
        self._nodes: dict[tuple[str, int, int], RayNode] = {}  # by role, index and replica
        self._places: dict[tuple[str, int, int], str] = {}
        self._moved: dict[str, str] = {}  # first address of a server → current address

    @property
    def result(self) -> bytes:
        """The pickled value that the function returned on worker 0."""
        return self._first.result if self._first else b""

    def run(self, base: Mapping[str, str], attempt: int) -> int:
        """Run the job and return its exit status. `base`: variables of every process. No actor is left afterwards."""
        with self._stack:
            try:
                self._reserve(is_first=attempt == 0)
            except NodeLost as error:
                self._report(f"[fleetrun] Ray cannot start the actors; is torchfleet installed on all nodes? {error}")
                return 1
            job = self._with_keys()
            self._key_dir, self._book = job.key_dir, Path(str(job.address_book))
            layout = layout_of(self._plan, self._places)
            self._way, self._servers = job.way, layout.servers
            made = self._ranks(base, attempt) if self._plan.num_ranks else server_tasks(job, self._plan, layout, base)
            for number, task in enumerate(made):  # a different metrics port for each: several may share a node
                task.environment |= port_variables(job.watching, number)
            self._tell_targets(made)
            supervisor = JobSupervisor(job, layout, made, self._run_dir, attempt, self._start)
            code = supervisor.run()
            self.is_finished = supervisor.is_finished
            return code

    def _tell_targets(self, made: Sequence[Task]) -> None:
        """Write the metrics targets. Workers that Ray starts later are missing: their nodes are not known yet."""
        placed = [(task, self._places.get((task.role, task.index, task.replica))) for task in made]
        hosts = {task.name: (task, place.rpartition(":")[0].strip("[]")) for task, place in placed if place}
        ports = {name: served_on(host, task.environment) for name, (task, host) in hosts.items()}
        if told := tell_targets(self._run_dir, ports):
            self._report(f"[fleetrun] {told}")

    def _reserve(self, is_first: bool) -> None:
        """Reserve resources, create an actor for every process, and get the address of each.

        Raises RoleError if the cluster can never provide them. Only the first attempt checks this: afterwards, a
        cluster that lost a node may get the node back.
        """
        plan, groups = self._plan, []
        shares = plan.shares(self._job, plan.min_workers) if is_first else []
        check = partial(refuse_too_large, require_ray(), shares)
        check()
        if plan.num_ranks:
            groups.append((self._group("rank", plan.num_ranks, plan.placement), "rank", plan.num_ranks, 1))
        else:
            servers = self._group("server", plan.num_servers * plan.replicas, "SPREAD")
            workers = self._group("worker", plan.min_workers, plan.placement)
            groups += [(servers, "server", plan.num_servers, plan.replicas), (workers, "worker", plan.min_workers, 1)]
        for group, role, num, replicas in groups:
            group.wait(self._report, check)
            for i in range(num * replicas):
                key = (role, i % num, i // num)
                self._nodes[key] = group.actor(i, is_restarted=bool(self._job.max_restart))
        self._places = {key: node.place() for key, node in self._nodes.items()}
        for i in range(plan.min_workers, plan.num_workers):  # Ray starts these when and where it has resources
            self._nodes["worker", i, 0] = self._group("worker", 1, plan.placement).actor(0, is_restarted=True)
        told = ", ".join(f"{Task(*key[:2], replica=key[2]).name} on {place}" for key, place in self._places.items())
        self._report(f"[fleetrun] placed by Ray: {told}")

    def _group(self, role: str, num: int, strategy: str) -> PlacementGroup:
        group = PlacementGroup(num, self._job.resources_of(role), strategy, f"{num} {role}s")
        self._stack.callback(group.close)
        return group

    def _with_keys(self) -> JobSpec:
        """Return the job with the given or newly generated keys, and with the address book of this machine."""
        folder = private_folder()
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        book = folder / "addresses"
        write_book(book, {})
        key_dir = self._job.key_dir
        if key_dir is None and not self._job.insecure and not self._plan.num_ranks:
            keygen(folder / "keys")
            key_dir = str(folder / "keys")
        return dataclasses.replace(self._job, key_dir=key_dir, address_book=str(book))

    def _ranks(self, base: Mapping[str, str], attempt: int) -> list[Task]:
        place = self._places["rank", 0, 0]
        if not self._job.insecure and not is_private(f"tcp://{place}"):
            raise RoleError(
                f"the ranks would meet at {place}, which other machines can reach, and torch.distributed neither "
                "encrypts nor authenticates: everyone on that network could read and change the training, and run "
                "code. Say --insecure if no other user is on it."
            )
        return rank_tasks(self._job, self._plan, base, place, attempt)

    def _start(self, task: Task, report: Report, echo: bool, append: bool) -> RayTask:
        """Implements Start."""
        job = self._job
        keys = {} if self._plan.num_ranks else keys_for(task.role, task.index, self._key_dir)
        command = self._plan.command_of(task.role)
        work = Work(task, command, self._plan.script, keys, function=self._function)
        node = self._nodes[task.role, task.index, task.replica]
        log, is_json = self._run_dir / task.log_name, job.watching.is_json
        output = Output(task, log, report, echo, append, job.max_log_bytes, is_json)
        needed = self._is_needed if self._plan.is_elastic and task.index >= self._plan.min_workers else None
        started = RayTask(work, node, self._run_dir, output, report, self._has_moved, needed, self._is_gone)
        if task.role != "server" and task.index == 0:
            self._first = started
        if task.role == "worker" and needed is None:
            self._lasting.append(started)
        return started

    def _is_gone(self, task: Task) -> None:
        """Called when an elastic worker was lost with its node."""
        try:
            leave_for(task.index, self._way, self._servers)
        except FleetError as error:
            self._report(f"[fleetrun] cannot tell the servers: {error}")

    def _is_needed(self) -> bool:
        """Whether an elastic job still has work for workers that joined later."""
        return any(worker.returncode is None for worker in self._lasting)

    def _has_moved(self, task: Task, place: str) -> dict[str, str]:
        """Called when a process restarts at `place`. The new address of a server is sent to all processes. Returns the
        current addresses of all servers that moved."""
        if task.role != "server":  # it has no address that others use, and a late worker has none here
            return self._moved
        name = self._places[task.role, task.index, task.replica]
        if self._moved.get(name, name) != place:
            self._moved = {**self._moved, name: place}
            write_book(self._book, self._moved)
            self._report(f"[fleetrun] {task.name} is at {place} now")
            for node in self._nodes.values():
                node.move(self._moved)
        return self._moved


Key = tuple[str, int, int]  # of a process: its role, its index, its replica


def layout_of(plan: RayPlan, places: Mapping[Key, str]) -> JobLayout:
    """Return the layout of a job with servers whose processes have these addresses, host:port. Workers that Ray starts
    later may be missing."""
    servers = tuple(
        SEPARATOR.join(places["server", i, replica] for replica in range(plan.replicas))
        for i in range(plan.num_servers)
    )
    hosts = [places.get(("worker", i, 0), "(no node yet):0") for i in range(plan.num_workers)]
    workers = tuple(f"{place.rpartition(':')[0]}:0" for place in hosts)
    backups = tuple(range(plan.num_servers)) if plan.replicas > 1 else ()
    return JobLayout(servers, workers, tuple(range(plan.num_servers)), tuple(range(plan.num_workers)), backups)


def server_tasks(job: JobSpec, plan: RayPlan, layout: JobLayout, base: Mapping[str, str]) -> list[Task]:
    """Return the processes of a job with servers. `base`: variables of all of them."""
    common = {**_passed_on(), **base, **({"FLEET_INSECURE": "1"} if job.insecure else {})}
    made = tasks(layout, len(layout.workers), common)
    for task in made:
        if plan.is_elastic:
            del task.environment["FLEET_WORKER_ENDPOINTS"]  # not all addresses are known
        if task.role == "worker" and not os.environ.get("OMP_NUM_THREADS"):
            task.environment["OMP_NUM_THREADS"] = str(max(1, int(job.resources_of("worker").cpus or 1)))
    return made


def rank_tasks(job: JobSpec, plan: RayPlan, base: Mapping[str, str], place: str, attempt: int = 0) -> list[Task]:
    """Return the processes of a collective job, which meet at `place`, host:port. `base`: variables of all of them."""
    host, _, port = place.rpartition(":")
    resources = job.resources_of("rank")
    common = {
        **_passed_on(), **base, "WORLD_SIZE": str(plan.num_ranks), "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port, "PYTHONUNBUFFERED": "1", "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "LOCAL_WORLD_SIZE": str(plan.ranks_per_machine),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, int(resources.cpus or 1))),
    }  # fmt: skip
    # An actor sees only the GPUs that Ray assigned to it: the rank uses the first.
    local = [0 if resources.gpus else i % plan.ranks_per_machine for i in range(plan.num_ranks)]
    return [Task("rank", i, {**common, "RANK": str(i), "LOCAL_RANK": str(n)}) for i, n in enumerate(local)]


def _passed_on() -> dict[str, str]:
    """Return the variables of this process that are settings of torchfleet and do not define a role."""
    return {
        name: value for name, value in surroundings().items() if name.startswith("FLEET_") and not name.startswith(_OWN)
    }
