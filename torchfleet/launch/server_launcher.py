"""The launcher of parameter-server jobs: servers and workers as processes of this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.errors import RoleError
from torchfleet.launch.endurance.durability import add_options as add_durability_options
from torchfleet.launch.endurance.durability import described_store, durability_variables, log_store, make_store
from torchfleet.launch.endurance.placement import (
    add_options,
    coordination,
    coordinator_url,
    described_coordination,
    num_replicas,
    waiting_variables,
    with_backups,
)
from torchfleet.launch.endurance.worker_loss import add_option as add_loss_option
from torchfleet.launch.endurance.worker_loss import loss_variables
from torchfleet.launch.job_spec import JobSpec, Task, describe_settings, describe_task, is_late
from torchfleet.launch.late_workers import supervisor_of
from torchfleet.launch.privacy import KINDS, kind_of, private_folder, told
from torchfleet.launch.roles import (
    JobLayout,
    given_threads,
    is_any_address,
    one_machine,
    several_machines,
    spare_servers,
    tasks,
)
from torchfleet.launch.server_command import add_option as add_script_option
from torchfleet.launch.server_command import with_server_command
from torchfleet.launch.server_nursery import nursery_of
from torchfleet.observe.watch.json_display import line_printer
from torchfleet.observe.watch.metrics_ports import check_free, port_variables, tell_targets
from torchfleet.ps.net.keys import is_private
from torchfleet.ps.net.replica_channels import SEPARATOR
from torchfleet.ps.tables.settings.storage import tier_variables
from torchfleet.ps.tables.settings.table_size import VARIABLE, parse_bytes

ROOTS = "FLEET_SAVE_ROOTS"  # read by ps/server/saves/save_roots.py
_MOST_SECONDS = 7 * 24 * 3600.0
_NUMBER = re.compile(r"[0-9]{1,9}")
_LISTENING = ("--servers", "--heter_workers")  # options with addresses that others connect to
_MOST = 1 << 16  # number of ports of a host, more than the processes of any job


class ServerLauncher:
    """Takes every job that no other launcher takes. The contracts of its methods: launchers.py."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("jobs with parameter servers")
        group.add_argument(
            "--servers",
            help="host:port of every server of the job, separated by commas; host:7000*4: ports 7000 to 7003 of it",
        )
        group.add_argument(
            "--workers", help="host:port of every worker (port 0: any; host:0*4: four); worker 0 is the first"
        )
        group.add_argument(
            "--heter_worker_num",
            type=int,
            metavar="N",
            help="heter workers, which compute the blocks under fleet.device_guard('gpu') for the workers (default: 0)",
        )
        group.add_argument(
            "--heter_workers", help="host:port of every heter worker, beside --servers and --workers; host:7100*2: two"
        )
        group.add_argument(
            "--max_table_bytes",
            metavar="SIZE",
            help="largest size of one table on a server, such as 8GB (default: all memory of the machine or container)",
        )
        group.add_argument(
            "--table_memory",
            metavar="SIZE",
            help="keep the rows used last of each table in this much memory of its server, such as 8GB, and the others "
            "on disk; needs --table_path",
        )
        group.add_argument(
            "--table_path",
            metavar="DIR",
            help="folder on a fast local disk of every server, for the rows that do not fit --table_memory",
        )
        group.add_argument(
            "--save_root",
            action="append",
            metavar="DIR",
            help="servers write saves below this folder or URL only; may be given several times (default: wherever "
            "worker 0 itself can write)",
        )
        group.add_argument(
            "--orphan_timeout",
            type=float,
            metavar="SECONDS",
            help="servers end after this time without a sign of a worker, once one was there (default: 1800; 0: never)",
        )

        group.add_argument(
            "--log_max_bytes",
            metavar="SIZE",
            help="largest size of a log; a full log is renamed to NAME.1, and replaces the earlier NAME.1 "
            "(default: 1GB)",
        )
        group.add_argument(
            "--private",
            choices=KINDS,
            help="how a job on this machine alone keeps its other users out: keys of its own, or sockets in a folder "
            "of this user (default: ipc)",
        )
        group.add_argument("--plain", action="store_true", help="let every user of this machine reach the servers")
        add_script_option(group)
        add_loss_option(group)
        add_durability_options(group)
        add_options(group)

    def takes(self, options: argparse.Namespace) -> bool:
        return True

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        job, reasons = _with_servers(job, options)
        layout, num_workers, url = _layout(job, options)
        reasons += told(kind_of(job, layout, options.private, options.plain))
        kept = described_store(durability_variables(options))
        asked = described_coordination(url, num_replicas(options.replicas))
        local_tasks = _tasks(job, options, layout, num_workers, {**kept, **asked})
        lines = [*reasons, *describe_settings(job)]
        for task in local_tasks:
            later = "joins when cores are free; " if is_late(job, task) else ""
            lines += describe_task(task, job.command_of(task.role), f"{later}log: {job.latest / task.log_name}")
        return lines

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        job, reasons = _with_servers(job, options)
        layout, num_workers, url = _layout(job, options)
        planned = _tasks(job, options, layout, num_workers)  # finds mistakes before a folder is created
        check_free(job.watching, len(planned))
        if layout.local_servers or layout.local_backups:
            make_store(durability_variables(options), layout.local_servers, layout.local_backups)
        kind = kind_of(job, layout, options.private, options.plain)
        code, run_dir = 0, job.make_run_dir()
        told_now = tell_targets(run_dir, {task.name: task.environment for task in planned})
        say = line_printer(job.watching)
        for line in filter(None, (f"logs in {run_dir}", *reasons, told_now)):
            say(f"[fleetrun] {line}")
        for attempt in range(job.max_job_restart + 1):
            layout, num_workers, _ = _layout(job, options)  # new free ports for every attempt
            with contextlib.ExitStack() as stack:
                made = stack.enter_context(private_folder(job, layout, kind))
                kept = stack.enter_context(log_store(durability_variables(options), run_dir))
                asked = stack.enter_context(coordination(url, num_replicas(options.replicas), attempt))
                local_tasks = _tasks(made, options, layout, num_workers, {**kept, **asked})
                nursery = stack.enter_context(nursery_of(made, local_tasks))
                supervisor = supervisor_of(made, layout, local_tasks, run_dir, attempt, nursery)
                code = supervisor.run()
            if code != 1 or supervisor.is_finished:
                break
            if attempt < job.max_job_restart:
                say(f"[fleetrun] starting the job again ({attempt + 1} of {job.max_job_restart})")
        return code


def _with_servers(job: JobSpec, options: argparse.Namespace) -> tuple[JobSpec, list[str]]:
    """Return the job with the command of its servers and their number, also for `--server_num auto`, and lines with the
    reasons."""
    job, told = with_server_command(job, options)
    if job.num_servers != "auto":
        return job, told
    num_workers = 1 if job.num_workers is None else job.num_workers
    num_servers, why = spare_servers(usable_cores(), num_workers, given_threads())
    return dataclasses.replace(job, num_servers=num_servers), [why, *told]


def _tasks(
    job: JobSpec,
    options: argparse.Namespace,
    layout: JobLayout,
    num_workers: int,
    kept: Mapping[str, str] | None = None,
) -> list[Task]:
    """Return the processes to start on this machine. With `--server_num auto`, and in an elastic job, the workers'
    threads leave one core for every server. `kept`: variables for the servers' logs and coordinator, if they are known.
    """
    if not job.insecure and not job.key_dir:
        _refuse_open_servers(layout)
    kept = durability_variables(options) if kept is None else kept
    if job.min_workers:
        given_threads()  # raises if OMP_NUM_THREADS is not a number: workers join when this number of cores is free
    rules = loss_variables(options, num_workers, job.min_workers)
    rules |= waiting_variables(options.no_wait_for_backups, num_replicas(options.replicas))
    base = {**job.environment, **server_bounds(options), **rules, **kept}
    num_local = len(layout.local_servers) + len(layout.local_backups)
    made = tasks(layout, num_workers, base, num_local if job.min_workers or options.server_num == "auto" else 0)
    for number, task in enumerate(made):
        task.environment |= port_variables(job.watching, number)
    return made


def server_bounds(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that limit the servers: table sizes, timeouts and save folders. Raises RoleError."""
    tiers = tier_variables(options.table_memory, options.table_path)
    return {**limits(options.max_table_bytes, options.orphan_timeout), **tiers, **roots(options.save_root)}


def limits(max_table_bytes: str | None, orphan_timeout: float | None) -> dict[str, str]:
    """Return the variables with the maximum size of a table, which also holds for workers with tables of their own, and
    with the time that servers wait for workers."""
    found = {}
    if max_table_bytes is not None:
        found[VARIABLE] = str(parse_bytes(max_table_bytes, "--max_table_bytes"))
    if orphan_timeout is not None:
        if not (orphan_timeout == 0 or 1 <= orphan_timeout <= _MOST_SECONDS):
            raise RoleError(
                f"--orphan_timeout must be 0 or a number of seconds from 1 to {_MOST_SECONDS:g}, found {orphan_timeout}"
            )
        found["FLEET_ORPHAN_TIMEOUT"] = f"{orphan_timeout:g}"
    return found


def roots(folders: Sequence[str] | None) -> dict[str, str]:
    """Return the variable with the folders below which servers may write saves."""
    if not folders:
        return {}
    for folder in folders:
        if "," in folder or not folder.strip():
            raise RoleError(f"--save_root: expected a folder, or a URL, without a comma; found {folder!r}")
    return {ROOTS: ",".join(folder if "://" in folder else os.path.abspath(folder) for folder in folders)}


def _layout(job: JobSpec, options: argparse.Namespace) -> tuple[JobLayout, int, str | None]:
    """Return the layout, the number of workers of the whole job, and the coordinator of servers with replicas, if one
    is given."""
    replicas = num_replicas(options.replicas)
    layout, num_workers = _places(job, options, replicas)
    return layout, num_workers, coordinator_url(options.coordinator, replicas, layout.is_all_here)


def _places(job: JobSpec, options: argparse.Namespace, replicas: int) -> tuple[JobLayout, int]:
    servers, workers, heters = options.servers, options.workers, options.heter_workers
    num_heters = _num_heters(job, options)
    is_counted = any(num is not None for num in (job.num_servers, job.num_workers, options.heter_worker_num))
    is_listed = any(places is not None for places in (servers, workers, heters))
    if is_counted and is_listed:
        raise RoleError(
            "--server_num, --worker_num and --heter_worker_num place everything here, --servers, --workers and "
            "--heter_workers on several machines: use one kind"
        )
    if is_listed:
        if not servers or not workers:
            raise RoleError("a job on several machines needs both lists, --servers and --workers")
        listed, working = _addresses("--servers", servers), _addresses("--workers", workers)
        computing = [] if heters is None else _addresses("--heter_workers", heters)
        if twice := set(listed) & set(computing):
            raise RoleError(f"--servers and --heter_workers both list {', '.join(sorted(twice))}: use different ports")
        return several_machines(with_backups(listed) if replicas > 1 else listed, working, computing), len(working)
    assert job.num_servers != "auto"
    num_servers = 1 if job.num_servers is None else job.num_servers
    num_workers = 1 if job.num_workers is None else job.num_workers
    if num_servers < 1 or num_workers < 1:
        raise RoleError(f"--server_num and --worker_num must be at least 1, found {num_servers} and {num_workers}")
    return one_machine(num_servers, num_workers, replicas, num_heters), num_workers


def _num_heters(job: JobSpec, options: argparse.Namespace) -> int:
    """The number of heter workers of a job on this machine. Raises RoleError if there cannot be any."""
    num = options.heter_worker_num
    if num is not None and num < 1:
        raise RoleError(f"--heter_worker_num must be at least 1, found {num}: leave it out for a job without any")
    if job.min_workers is not None and (num or options.heter_workers):
        raise RoleError(
            "--worker_num MIN:MAX: workers of this job come and go, and heter workers compute for a fixed number of "
            "workers. Give one number, or leave --heter_worker_num out."
        )
    return num or 0


def _addresses(option: str, text: str) -> list[str]:
    written = [address.strip() for address in text.split(",") if address.strip()]
    addresses = [each for address in written for each in _expanded(option, address)]
    if not addresses:
        raise RoleError(f"{option} lists no address, found {text!r}")
    for address in addresses:
        if is_any_address(address):
            raise RoleError(
                f"{option}: {address} stands for all addresses of a machine, so that no machine takes it for its own "
                "and no worker can reach it. Give the name or address by which other machines reach this one; "
                "127.0.0.1 if all processes are on one machine."
            )
    if option in _LISTENING and len(set(addresses)) != len(addresses):
        raise RoleError(f"{option}: an address appears twice in {text!r}")
    return addresses


def _expanded(option: str, address: str) -> list[str]:
    """Expand host:port*N to N consecutive ports, or for workers without a port (0) to N workers. host:port is a
    single address.
    """
    place, star, count = address.partition("*")
    host, _, port = place.rpartition(":")
    least = 1 if option in _LISTENING else 0  # a server needs a known port; a worker does not
    numbers = [port, count] if star else [port]
    if not host or not all(_NUMBER.fullmatch(number) for number in numbers) or int(port) < least:
        raise RoleError(
            f"{option} expects host:port, or host:port*N for N of them, separated by commas; found {address!r}"
        )
    first, num = int(port), int(count or 1) if star else 1
    if not 0 < num < _MOST or first + (num - 1) * bool(first) >= _MOST:
        raise RoleError(
            f"{option} expects host:port with ports below {_MOST:,}, and fewer of them than that; found {address!r}"
        )
    return [f"{host}:{first + i * bool(first)}" for i in range(num)] if star else [place]


def _refuse_open_servers(layout: JobLayout) -> None:
    for i in sorted({*layout.local_servers, *layout.local_backups}):
        if not all(is_private(f"tcp://{place}") for place in layout.servers[i].split(SEPARATOR)):
            raise RoleError(
                f"server {i} at {layout.servers[i]} can be reached from other machines, and there are no keys. Make "
                "them with `fleetrun --keygen DIR`, copy DIR to every machine and give --key_dir DIR; or say "
                "--insecure."
            )
    for i in layout.local_heters:
        if not is_private(f"tcp://{layout.heters[i]}"):
            raise RoleError(
                f"heter worker {i} at {layout.heters[i]} can be reached from other machines, and there are no keys. "
                "Make them with `fleetrun --keygen DIR`, copy DIR to every machine and give --key_dir DIR; or say "
                "--insecure."
            )
