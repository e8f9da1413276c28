"""The launcher of jobs on Ray: every process runs in an actor of its own."""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.job_options import refuse_heter_workers
from torchfleet.launch.clusters.on_ray.package import PACKAGE, package_files
from torchfleet.launch.clusters.on_ray.ray_cluster import (
    Files,
    bundle_of,
    connected,
    is_sent_by_job,
    relative,
    require_ray,
)
from torchfleet.launch.clusters.on_ray.ray_job import RayJob, RayPlan, layout_of, rank_tasks, server_tasks
from torchfleet.launch.clusters.on_ray.ray_room import cores_of
from torchfleet.launch.clusters.sent_files import described_files
from torchfleet.launch.endurance.durability import described_store, durability_variables, log_store, require_store
from torchfleet.launch.endurance.placement import (
    coordination,
    coordinator_url,
    described_coordination,
    num_replicas,
    waiting_variables,
)
from torchfleet.launch.endurance.worker_loss import loss_variables
from torchfleet.launch.job_spec import JobSpec, Task, describe_settings, describe_task
from torchfleet.launch.server_command import with_server_command
from torchfleet.launch.server_launcher import server_bounds
from torchfleet.observe.watch.json_display import line_printer
from torchfleet.observe.watch.metrics_ports import port_variables

_NAME = "ray"
_RANKS = ("nproc_per_node", "nnodes")


class RayLauncher:
    """Takes a job with --cluster ray. The contracts of its methods: launchers.py."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("jobs on a cluster of Ray")
        group.add_argument(
            "--cluster",
            metavar="ray[=ADDRESS]|slurm",
            help="run the job on Ray: the cluster that Ray finds by itself, the one at host:port, or ray=local for one "
            "on this machine alone. slurm: this process is a task of srun, and becomes one role of the job",
        )
        group.add_argument(
            "--placement",
            choices=("pack", "spread"),
            help="workers on as few nodes as possible, or on many (default: pack); servers are spread",
        )

        group.add_argument(
            "--files",
            action="append",
            default=[],
            metavar="PATH",
            help="Ray: send this file, or all files of this folder, too; below the script's folder; several times",
        )

    def takes(self, options: argparse.Namespace) -> bool:
        if options.files and not (options.cluster or "").startswith(_NAME):
            raise RoleError(
                f"--files {options.files[0]}: only jobs on Ray send files. Add --cluster ray, or leave it out."
            )
        if options.cluster is None:
            if options.placement is not None:
                raise RoleError(f"--placement {options.placement} is about nodes of Ray: add --cluster ray")
            return False
        name, is_given, address = options.cluster.partition("=")
        if name != _NAME or (is_given and not address):
            raise RoleError(
                f"--cluster expects ray, ray=ADDRESS, or slurm inside a job of Slurm; found {options.cluster!r}. "
                "Kubernetes has a command of its own: fleetrun k8s."
            )
        refuse_heter_workers(options)
        self._check_kinds(options)
        return True

    @staticmethod
    def _check_kinds(options: argparse.Namespace) -> None:
        ranks = [f"--{name}" for name in _RANKS if getattr(options, name) is not None]
        others = [f"--{name}" for name in ("server_num", "worker_num") if getattr(options, name) is not None]
        if ranks and others:
            raise RoleError(
                f"{', '.join(ranks)} start a collective job, {', '.join(others)} one with parameter servers: use one "
                "kind"
            )
        if options.server_num == "auto":
            raise RoleError("--server_num auto counts cores of this machine: on Ray, give a number")

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        plan = _plan(job, options, job.folder)
        base = {**_variables(job, options), **_coordinator(options)}
        lines = [f"cluster: {options.cluster}; {_keys(job, plan)}; {_placement(plan)}", *describe_settings(job)]
        lines += described_files(*_files(job, options, is_function=False), PACKAGE)
        lines += with_server_command(job, options)[1] if plan.num_servers else []
        for number, task in enumerate(_described(job, plan, base)):
            task.environment |= port_variables(job.watching, number)
            bundle = ", ".join(f"{name} {value:g}" for name, value in bundle_of(job.resources_of(task.role)).items())
            log = f"log: {job.latest / task.log_name}"
            lines += describe_task(task, ("python", *plan.command_of(task.role)), f"actor with {bundle}; {log}")
        return lines

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        return run(job, options)[0]


def run(job: JobSpec, options: argparse.Namespace, function: bytes = b"") -> tuple[int, bytes]:
    """Run the job on Ray. Returns its exit status and the pickled value that `function`, pickled by fleet.ray, returned
    on worker 0.

    Raises RoleError for invalid options before anything is started.
    """
    ray = require_ray()
    if options.files and (ray.is_initialized() or is_sent_by_job()):
        raise RoleError(f"--files {options.files[0]}: Ray has sent a folder to the nodes already. Put it there.")
    whole = _plan(job, options, job.folder)
    port_variables(job.watching, whole.num_processes - 1)  # raises for an invalid port
    _variables(job, options)
    address = options.cluster.partition("=")[2] or "auto"
    url = coordinator_url(options.coordinator, num_replicas(options.replicas), is_all_here=False)
    attempts = 1 + (job.max_restart if _is_collective(options) else job.max_job_restart)
    code, result = 1, b""
    try:
        say = line_printer(job.watching)
        num_cores = cores_of(whole.shares(job, whole.num_workers))
        with connected(address, job, num_cores, partial(_files, job, options, bool(function)), say) as folder:
            plan, run_dir = _plan(job, options, folder), job.make_run_dir()
            told = with_server_command(job, options)[1] if plan.num_servers else []
            for line in (f"logs in {run_dir}", *told):
                say(f"[fleetrun] {line}")
            for attempt in range(attempts):
                with contextlib.ExitStack() as stack:
                    kept = stack.enter_context(log_store(durability_variables(options), run_dir))
                    asked = stack.enter_context(coordination(url, plan.replicas, attempt))
                    base = {**_limits(job, options), **kept, **asked}
                    attempted = RayJob(job, plan, run_dir, say, function)
                    code, result = attempted.run(base, attempt), attempted.result
                if code != 1 or attempted.is_finished:
                    break
                if attempt + 1 < attempts:
                    say(f"[fleetrun] starting the job again ({attempt + 1} of {attempts - 1})")
    except KeyboardInterrupt:  # before or after the supervisor handles signals
        return 130, b""
    return code, result


def _files(job: JobSpec, options: argparse.Namespace, is_function: bool) -> Files:
    """Return the files that are sent to the nodes. Raises RoleError if there are keys among them."""
    script, module = (None, options.script) if options.module else (options.script, None)
    return package_files(job.folder, script, None if is_function else module, options.files, job.key_dir)


def _is_collective(options: argparse.Namespace) -> bool:
    return any(getattr(options, name) is not None for name in _RANKS)


def _plan(job: JobSpec, options: argparse.Namespace, folder: Path) -> RayPlan:
    """Return what the job requests from the cluster. Raises RoleError for invalid options."""
    script = None if options.module else Path(options.script).absolute()
    command, name = relative(job.command, script, folder)
    placement = (options.placement or "pack").upper()
    if _is_collective(options):
        machines = options.nnodes or "1"
        if not machines.isdigit() or int(machines) < 1 or (options.nproc_per_node or 1) < 1:
            raise RoleError(
                f"on Ray --nnodes and --nproc_per_node must be numbers above 0; found {machines} and "
                f"{options.nproc_per_node or 1}"
            )
        spread = placement if options.placement else "SPREAD" if int(machines) > 1 else "PACK"
        ranks = options.nproc_per_node or 1
        return RayPlan(command, name, num_machines=int(machines), ranks_per_machine=ranks, placement=spread)
    num_servers = 1 if job.num_servers is None else job.num_servers
    num_workers = 1 if job.num_workers is None else job.num_workers
    assert num_servers != "auto"
    if num_servers < 1 or num_workers < 1:
        raise RoleError(f"--server_num and --worker_num must be at least 1, found {num_servers} and {num_workers}")
    replicas, least = num_replicas(options.replicas), job.min_workers or num_workers
    bare = with_server_command(job, options)[0].server_command[1:]  # the node's own interpreter is used
    return RayPlan(command, name, num_servers, num_workers, replicas, least, placement=placement, server_command=bare)


def _variables(job: JobSpec, options: argparse.Namespace) -> dict[str, str]:
    """Return all processes' variables for logs, limits, lost workers, save folders and tracing, for --dry_run. Raises
    RoleError."""
    kept = durability_variables(options)
    require_store(
        kept,
        "a folder that all nodes share. A server of a lost node starts on another one, and the log on the lost node's "
        "own disk is gone",
    )
    _coordinator(options)
    return {**_limits(job, options), **described_store(kept)}


def _coordinator(options: argparse.Namespace) -> dict[str, str]:
    replicas = num_replicas(options.replicas)
    return described_coordination(coordinator_url(options.coordinator, replicas, is_all_here=False), replicas)


def _keys(job: JobSpec, plan: RayPlan) -> str:
    if plan.num_ranks:
        return "no keys: ranks talk without, also to other machines" if job.insecure else "no keys: ranks talk without"
    if job.key_dir:
        return f"keys of {job.key_dir}"
    return "no keys" if job.insecure else "keys are made for this job"


def _placement(plan: RayPlan) -> str:
    return f"{'ranks' if plan.num_ranks else 'workers'} are placed by {plan.placement}"


def _limits(job: JobSpec, options: argparse.Namespace) -> dict[str, str]:
    rules = loss_variables(options, job.num_workers or 1, job.min_workers)
    rules |= waiting_variables(options.no_wait_for_backups, num_replicas(options.replicas))
    return {**server_bounds(options), **rules, **job.telling_variables}


def _described(job: JobSpec, plan: RayPlan, base: dict[str, str]) -> list[Task]:
    """Return the processes for `--dry_run`. Their addresses are known only after Ray has placed them."""
    if plan.num_ranks:
        made = rank_tasks(job, plan, base, "(node of rank 0):(a free port)")
    else:
        counts = [("server", plan.num_servers, plan.replicas), ("worker", plan.num_workers, 1)]
        keys = [(role, i, replica) for role, num, replicas in counts for replica in range(replicas) for i in range(num)]
        places = {key: f"(node of {Task(*key[:2], replica=key[2]).name}):(a free port)" for key in keys}
        made = server_tasks(job, plan, layout_of(plan, places), base)
    for task in made:
        task.environment["FLEET_ADDRESS_BOOK"] = "(a file on each node)"
        if not plan.num_ranks and (job.key_dir or not job.insecure):
            task.environment["FLEET_KEY_DIR"] = "(a private folder on each node)"
    return made
