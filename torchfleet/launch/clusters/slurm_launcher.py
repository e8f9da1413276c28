"""The launcher for Slurm tasks: each task that srun starts runs one role, or one machine of a collective job."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Mapping

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.stop_request import REQUEUE
from torchfleet.base.role.process_settings import LOG_RUN, LOG_STORE, start_timeout_of
from torchfleet.launch.clusters.foreground import Ending, asks_blocked, run_child
from torchfleet.launch.clusters.job_options import refuse_heter_workers
from torchfleet.launch.clusters.member import read_role
from torchfleet.launch.clusters.slurm_meeting import SlurmMeeting
from torchfleet.launch.clusters.slurm_step import SlurmStep, read_step, refuse_copies
from torchfleet.launch.clusters.slurm_watch import watched
from torchfleet.launch.endurance.durability import durability_variables, require_store
from torchfleet.launch.endurance.worker_loss import loss_variables
from torchfleet.launch.job_spec import JobSpec, Report, Task, describe_settings, describe_task
from torchfleet.launch.processes import Process
from torchfleet.launch.ranks.rank_launcher import RankLauncher
from torchfleet.launch.server_command import with_server_command
from torchfleet.launch.server_launcher import server_bounds
from torchfleet.observe.watch.figures import plural
from torchfleet.observe.watch.json_display import line_printer
from torchfleet.observe.watch.metrics_ports import port_variables

SAVE = "FLEET_SAVE_ON_STOP"
_COLLECTIVE = ("nproc_per_node", "gpus")


class SlurmLauncher:
    """Takes a job with --cluster slurm. The contracts of its methods: launchers.py."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("jobs under Slurm: every task of a step is one server or worker")
        group.add_argument(
            "--save_on_stop",
            metavar="DIR",
            help="when Slurm asks the job to end (SIGUSR1), worker 0 saves there after its step, and ends with status "
            f"{REQUEUE}",
        )
        group.add_argument(
            "--requeue", action="store_true", help=f"a job that ends with status {REQUEUE} is requeued by scontrol"
        )

    def takes(self, options: argparse.Namespace) -> bool:
        is_slurm = options.cluster == "slurm"
        own = [f"--{name}" for name in ("save_on_stop", "requeue") if getattr(options, name)]
        if own and not is_slurm:
            raise RoleError(f"{', '.join(own)}: for tasks of Slurm. Add --cluster slurm, or leave it out.")
        if not is_slurm:
            if not _is_part(options):
                refuse_copies(os.environ)
            return False
        refuse_heter_workers(options)
        if options.dashboard is not None and not _is_collective(options):
            raise RoleError(
                "--dashboard: it would be served on the node of the first task alone. That task records the job: run "
                f"`fleet dashboard {options.log_dir}` where you sit."
            )
        if _is_collective(options) and options.save_on_stop:
            raise RoleError("--save_on_stop: the ranks of a collective job save together, by fleet.stop_if_asked")
        return True

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        """Describe what this task would start, with placeholders for addresses that are not known yet."""
        step = read_step(os.environ)
        if _is_collective(options):
            host = step.nodes[0] if len(set(step.nodes)) > 1 else "127.0.0.1"
            ranks = _as_machine(step, options, f"{host}:1")  # task 0 chooses a free port
            return [*_settings(options), *RankLauncher().describe(job, ranks, "the node of task 0, on a free port")]
        num_servers, num_workers = _counts(job, step)
        places = [f"(the node of task {number}):(a port of job {step.job})" for number in range(num_servers)]
        task = _task(job, options, step, places, num_workers)
        job, told = with_server_command(job, options)
        log = f"log: {job.log_dir / step.name / task.log_name}"
        return [
            *_settings(options),
            *describe_settings(job),
            *told,
            *describe_task(task, job.command_of(task.role), log),
        ]

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        step = read_step(os.environ)
        timeout = start_timeout_of(os.environ)
        meeting = SlurmMeeting(job.log_dir, step, timeout)
        with asks_blocked():
            status = (_run_ranks if _is_collective(options) else _run_role)(job, options, step, meeting)
        num_servers = 0 if _is_collective(options) else _counts(job, step)[0]
        if status == REQUEUE and options.requeue and step.rank == num_servers:  # worker 0, or machine 0
            _requeue(step, line_printer(job.watching))
        return status


def _settings(options: argparse.Namespace) -> list[str]:
    return [f"requeue: if the job ends with status {REQUEUE}"] if options.requeue else []


def _is_part(options: argparse.Namespace) -> bool:
    """Whether fleetrun starts only this machine's part of a job: then srun may start fleetrun once on each machine."""
    machines = options.servers or options.workers or options.ips or options.nnodes not in (None, "1")
    return options.cluster is None and bool(machines)


def _is_collective(options: argparse.Namespace) -> bool:
    return any(getattr(options, name) is not None for name in _COLLECTIVE)


def _run_ranks(job: JobSpec, options: argparse.Namespace, step: SlurmStep, meeting: SlurmMeeting) -> int:
    """Run this task as a machine of a collective job."""
    if step.rank == 0:
        meeting.publish("machine.0", 0)
    return RankLauncher().run(job, _as_machine(step, options, meeting.places(["machine.0"])[0]))


def _run_role(job: JobSpec, options: argparse.Namespace, step: SlurmStep, meeting: SlurmMeeting) -> int:
    """Run this task as a server or a worker."""
    say = line_printer(job.watching)
    num_servers, num_workers = _counts(job, step)
    job, told = with_server_command(job, options)
    if step.rank == 0:
        for line in told:
            say(f"[fleetrun] {line}")
        roles = f"{plural(num_servers, 'server')}, {plural(num_workers, 'worker')}"
        say(f"[fleetrun] {roles}; logs in {meeting.folder}")
    if step.rank < num_servers:
        meeting.publish(f"server.{step.rank}", step.rank)
    keys = {} if job.insecure or job.key_dir else {"FLEET_KEY_DIR": meeting.keys()}
    places = meeting.places([f"server.{number}" for number in range(num_servers)])
    task = _task(job, options, step, places, num_workers)
    task.environment |= keys
    read_role(task.environment)
    is_shown = step.rank == num_servers  # worker 0
    try:
        child = Process(
            task,
            job.command_of(task.role),
            meeting.folder,
            say,
            is_shown,
            False,
            job.max_log_bytes,
            job.watching.is_json,
        )
        ending = Ending()
        with watched(job, step, meeting.folder, num_servers, num_workers) as (show, show_end):
            status = run_child(child, ending, show)
            if not status:
                show_end()
    finally:
        meeting.remove_keys()
    if status:
        _tell(task, child, status, ending, say)
    child.close()
    return status


def _counts(job: JobSpec, step: SlurmStep) -> tuple[int, int]:
    """Return the numbers of servers and workers: from the options, else from the components, else one server."""
    if job.num_servers == "auto":
        raise RoleError("--server_num auto counts cores of this machine: give a number, as srun's --ntasks has one")
    if job.min_workers is not None:
        raise RoleError(
            "--worker_num MIN:MAX: a step of Slurm has as many tasks from its begin to its end: give one number"
        )
    first = step.components[0] if len(step.components) == 2 else 1
    num_servers = first if job.num_servers is None else job.num_servers
    num_workers = step.num_tasks - num_servers if job.num_workers is None else job.num_workers
    if num_servers < 1 or num_workers < 1 or num_servers + num_workers != step.num_tasks:
        raise RoleError(
            f"the step has {step.num_tasks} tasks, which are not {num_servers} servers and {num_workers} workers: "
            "every task runs one server or one worker, and a job needs both. Say srun --ntasks "
            f"{max(1, num_servers) + max(1, num_workers)}, or other numbers with --server_num and --worker_num."
        )
    if step.components and step.components[0] != num_servers:
        raise RoleError(
            f"the first component of the job has {step.components[0]} tasks, and there are {num_servers} servers: they "
            "are the first component"
        )
    return num_servers, num_workers


def _task(job: JobSpec, options: argparse.Namespace, step: SlurmStep, places: list[str], num_workers: int) -> Task:
    is_server = step.rank < len(places)
    role, index = ("server", step.rank) if is_server else ("worker", step.rank - len(places))
    environment = {
        **job.environment,
        **server_bounds(options),
        **_durability(options, step),
        **loss_variables(options, num_workers),
        "FLEET_SERVER_ENDPOINTS": ",".join(places),
        "FLEET_NUM_WORKERS": str(num_workers),
        "PYTHONUNBUFFERED": "1",
        "FLEET_ROLE": role.upper(),
        f"FLEET_{role.upper()}_INDEX": str(index),
        **port_variables(job.watching, step.rank),
        "OMP_NUM_THREADS": "1" if is_server else os.environ.get("OMP_NUM_THREADS") or str(step.cores),
    }
    if options.save_on_stop:
        environment[SAVE] = (
            os.path.abspath(options.save_on_stop) if "://" not in options.save_on_stop else options.save_on_stop
        )
    return Task(role, index, environment)


def _durability(options: argparse.Namespace, step: SlurmStep) -> Mapping[str, str]:
    found = durability_variables(options)
    require_store(found, "a folder that a requeued job finds again")
    return {**found, LOG_RUN: step.name} if LOG_STORE in found else found


def _as_machine(step: SlurmStep, options: argparse.Namespace, place: str) -> argparse.Namespace:
    """Return the options for this task as machine `rank` of a collective job."""
    one = step.num_tasks == 1
    given = {} if one else {"nnodes": str(step.num_tasks), "rank": step.rank, "master": place}
    return argparse.Namespace(**{**vars(options), **given})


def _tell(task: Task, child: Process, status: int, ending: Ending, say: Report) -> None:
    if ending.received or ending.is_asked:  # another task is the cause, and reports it
        why = "it was told to end" if ending.received else "the job was asked to end"
        say(f"[fleetrun] {task.name} ended with status {status}; {why}")
        return
    say(f"[fleetrun] {task.name} ended with status {status}. Last lines of {child.log}:")
    for line in child.last_lines():
        say(f"    {line}")


def _requeue(step: SlurmStep, say: Report) -> None:
    """Ask Slurm to requeue the job: Slurm ends all of it and starts it again."""
    command = ["scontrol", "requeue", str(step.job)]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        text = told.stderr.strip() or told.stdout.strip()
        done = f"job {step.job} is requeued" if not told.returncode else f"job {step.job} cannot be requeued: {text}"
    except (OSError, subprocess.TimeoutExpired) as error:
        done = f"job {step.job} cannot be requeued: {error}"
    say(f"[fleetrun] {done}")
