"""The launcher of parameter-server jobs: servers and workers as processes of this machine."""

from __future__ import annotations

import argparse

from torchfleet.errors import RoleError
from torchfleet.launch.job_spec import JobSpec, Task, describe_task
from torchfleet.launch.roles import JobLayout, one_machine, several_machines, tasks
from torchfleet.launch.supervisor import JobSupervisor
from torchfleet.net.keys import is_private
from torchfleet.tables.settings.table_size import VARIABLE, parse_bytes


class ServerLauncher:
    """Takes every job that no other launcher takes. The contracts of its methods: launchers.py."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("jobs with parameter servers")
        group.add_argument("--servers", help="host:port of every server of the job, separated by commas")
        group.add_argument("--workers", help="host:port of every worker (port 0: any); worker 0 is the first")
        group.add_argument(
            "--max_table_bytes",
            metavar="SIZE",
            help="largest size of one table on a server, such as 8GB (default: all memory of the machine or container)",
        )

    def takes(self, options: argparse.Namespace) -> bool:
        return True

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        _, local_tasks = _plan(job, options)
        return [
            line
            for task in local_tasks
            for line in describe_task(task, job.command, f"log: {job.latest / task.log_name}")
        ]

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        _plan(job, options)  # mistakes are found before a folder is made
        code, run_dir = 0, job.make_run_dir()
        print(f"[fleetrun] logs in {run_dir}", flush=True)
        for attempt in range(job.max_job_restart + 1):
            layout, local_tasks = _plan(job, options)  # free ports are found anew for every attempt
            supervisor = JobSupervisor(job, layout, local_tasks, run_dir, attempt)
            code = supervisor.run()
            if code != 1 or supervisor.is_finished:
                break
            if attempt < job.max_job_restart:
                print(f"[fleetrun] starting the job again ({attempt + 1} of {job.max_job_restart})", flush=True)
        return code


def _plan(job: JobSpec, options: argparse.Namespace) -> tuple[JobLayout, list[Task]]:
    """Where all servers and workers are, and the processes to start on this machine."""
    layout, num_workers = _layout(job, options.servers, options.workers)
    if not job.insecure and not job.key_dir:
        _refuse_open_servers(layout)
    return layout, tasks(layout, num_workers, {**job.environment, **limits(options.max_table_bytes)})


def limits(max_table_bytes: str | None) -> dict[str, str]:
    """The variable by which servers, and workers with tables of their own, learn how large a table may be."""
    if max_table_bytes is None:
        return {}
    return {VARIABLE: str(parse_bytes(max_table_bytes, "--max_table_bytes"))}


def _layout(job: JobSpec, servers: str | None, workers: str | None) -> tuple[JobLayout, int]:
    """The layout, and the number of workers of the whole job."""
    is_counted = job.num_servers is not None or job.num_workers is not None
    is_listed = servers is not None or workers is not None
    if is_counted and is_listed:
        raise RoleError(
            "--server_num/--worker_num place everything here, --servers/--workers on several machines: use one"
        )
    if is_listed:
        if not servers or not workers:
            raise RoleError("a job on several machines needs both lists, --servers and --workers")
        addresses = _addresses("--servers", servers), _addresses("--workers", workers)
        return several_machines(*addresses), len(addresses[1])
    num_servers = 1 if job.num_servers is None else job.num_servers
    num_workers = 1 if job.num_workers is None else job.num_workers
    if num_servers < 1 or num_workers < 1:
        raise RoleError(f"--server_num and --worker_num must be at least 1, found {num_servers} and {num_workers}")
    return one_machine(num_servers, num_workers), num_workers


def _addresses(option: str, text: str) -> list[str]:
    addresses = [address.strip() for address in text.split(",") if address.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        least = 1 if option == "--servers" else 0  # workers must know a server's port; a worker needs none
        if not (host and port.isascii() and port.isdigit() and least <= int(port) < 1 << 16):
            raise RoleError(f"{option} expects host:port, separated by commas; found {address!r}")
    if not addresses:
        raise RoleError(f"{option} lists no address, found {text!r}")
    if option == "--servers" and len(set(addresses)) != len(addresses):
        raise RoleError(f"{option}: an address appears twice in {text!r}")
    return addresses


def _refuse_open_servers(layout: JobLayout) -> None:
    for i in layout.local_servers:
        if not is_private(f"tcp://{layout.servers[i]}"):
            raise RoleError(
                f"server {i} at {layout.servers[i]} can be reached from other machines, and there are no keys. Make "
                "them with `fleetrun --keygen DIR`, copy DIR to every machine and give --key_dir DIR; or say "
                "--insecure."
            )
