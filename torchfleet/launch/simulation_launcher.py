"""The launcher of simulated jobs: servers and workers in virtual time, on this machine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.prometheus.metrics_port import HOST as METRICS_HOST
from torchfleet.base.monitor.prometheus.metrics_port import PORT as METRICS_PORT
from torchfleet.base.network_links import Link, parse_link
from torchfleet.launch.job_spec import JobSpec, Task, describe_task
from torchfleet.launch.roles import JobLayout, tasks
from torchfleet.launch.server_launcher import server_bounds
from torchfleet.launch.simulate.conditions import Conditions, Job, Part, parse_straggler
from torchfleet.launch.surroundings import surroundings
from torchfleet.launch.taken_options import CONDITIONS
from torchfleet.observe.watch.figures import plural
from torchfleet.observe.watch.json_display import print_text

if TYPE_CHECKING:
    from pathlib import Path

_FIRST_PORT = 10_000  # of placeholder addresses: no process listens on them
# Messages stay inside this machine, and no process serves metrics or sends traces of virtual time.
_WITHOUT = {"FLEET_KEY_DIR", "FLEET_INSECURE", METRICS_PORT, METRICS_HOST, "FLEET_TRACE_EVERY"}


class SimulationLauncher:
    """Takes a job with --simulate. The contracts of its methods: launchers.py."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("simulation: a job with servers in virtual time, on this machine").add_argument
        add("--simulate", action="store_true", help="run the script as it would run on as many machines")
        add("--link", metavar="RATE[,LATENCY]", help="a machine's link: 25Gbit,20us (default: 10Gbit,50us)")
        add("--straggler", metavar="SHARExFACTOR", help="slow workers: 0.05x3 makes 5 %% of them 3 times slower")
        add("--compute_scale", type=float, help="a worker's seconds per second of this machine (default: 1)")
        add("--step_ms", type=float, help="what a worker computes for a step, instead of measuring it")
        add(
            "--jitter", type=float, metavar="X", help="steps vary: a standard deviation of X times their computing time"
        )
        add("--simulation_seed", type=int, help="of who is slow, and of random and numpy (default: 0)")
        add("--throughput_only", action="store_true", help="no training: a model of queues, for thousands of workers")

    def takes(self, options: argparse.Namespace) -> bool:
        if not options.simulate:
            given = [f"--{name}" for name in CONDITIONS if getattr(options, name) not in (None, False)]
            if given:
                raise RoleError(
                    f"{', '.join(given)} {'describes' if len(given) == 1 else 'describe'} a simulation: add --simulate"
                )
            return False
        return True

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        conditions = _conditions(options)
        _, planned = _plan(job, options)
        what = "a model of queues, without training" if options.throughput_only else "the script"
        lines = [f"simulated in virtual time: {what}; {conditions}"]
        for task in planned:
            lines += describe_task(task, job.command, f"log: {job.latest / task.log_name}")
        return lines

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        conditions = _conditions(options)
        layout, planned = _plan(job, options)
        if options.throughput_only:
            return _forecast(job, options, layout, conditions)
        from torchfleet.launch.simulate.simulation import Simulation  # imports torch

        run_dir = job.make_run_dir()
        print_text(f"[fleetrun] simulating {len(planned)} processes in virtual time; logs in {run_dir}")
        return Simulation(_job(options, layout, planned, conditions, run_dir), run_dir, print_text).run()


def _forecast(job: JobSpec, options: argparse.Namespace, layout: JobLayout, conditions: Conditions) -> int:
    from torchfleet.launch.simulate.throughput import (  # imports torch
        PROFILE_SERVERS,
        PROFILE_WORKERS,
        forecast_throughput,
    )

    num_workers, num_servers = len(layout.workers), len(layout.servers)
    few_workers, few_servers = min(num_workers, PROFILE_WORKERS), min(num_servers, PROFILE_SERVERS)
    few = replace(job, num_workers=few_workers, num_servers=few_servers)
    small, planned = _plan(few, options)
    run_dir = job.make_run_dir()
    job_of = f"{plural(few_workers, 'worker')} and {plural(few_servers, 'server')}"
    print_text(f"[fleetrun] measuring a step with {job_of}; logs in {run_dir}")
    profiled = _job(options, small, planned, conditions, run_dir)
    return forecast_throughput(profiled, num_workers, num_servers, run_dir, print_text)


def _job(
    options: argparse.Namespace, layout: JobLayout, planned: list[Task], conditions: Conditions, run_dir: Path
) -> Job:
    around = {name: value for name, value in surroundings().items() if name not in _WITHOUT}
    one_thread = {"OMP_NUM_THREADS": "1"}
    parts = [
        Part(task.role, task.index, {**around, **task.environment, **one_thread}, run_dir / task.log_name)
        for task in planned
    ]
    return Job(options.script, options.arguments, parts, layout.servers, conditions, options.module)


def _conditions(options: argparse.Namespace) -> Conditions:
    for name in ("compute_scale", "step_ms"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise RoleError(f"--{name} must be a number above 0, found {value:g}")
    if options.step_ms is not None and options.compute_scale is not None:
        raise RoleError("--step_ms gives the time of a step, --compute_scale scales what is measured: use one of them")
    if options.jitter is not None and not 0 <= options.jitter <= 10:
        raise RoleError(f"--jitter must be a number from 0 to 10, found {options.jitter:g}")
    share, factor = parse_straggler(options.straggler) if options.straggler else (0.0, 1.0)
    return Conditions(
        link=parse_link(options.link) if options.link else Link(),
        compute_scale=options.compute_scale or 1.0,
        step_seconds=options.step_ms / 1000 if options.step_ms else None,
        slow_share=share,
        slow_factor=factor,
        jitter=options.jitter or 0.0,
        seed=options.simulation_seed or 0,
    )


def _plan(job: JobSpec, options: argparse.Namespace) -> tuple[JobLayout, list[Task]]:
    """Return a layout with an address for each simulated machine, and the processes."""
    if job.num_servers == "auto":
        raise RoleError(
            "--server_num auto counts cores of this machine, and a simulated server has a machine: give a number"
        )
    num_servers = 1 if job.num_servers is None else job.num_servers
    num_workers = 1 if job.num_workers is None else job.num_workers
    if num_servers < 1 or num_workers < 1:
        raise RoleError(f"--server_num and --worker_num must be at least 1, found {num_servers} and {num_workers}")
    servers = tuple(f"127.0.0.1:{_FIRST_PORT + i}" for i in range(num_servers))
    layout = JobLayout(servers, ("127.0.0.1:0",) * num_workers, tuple(range(num_servers)), tuple(range(num_workers)))
    return layout, tasks(layout, num_workers, server_bounds(options))
