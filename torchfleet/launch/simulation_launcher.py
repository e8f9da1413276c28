"""The launcher of simulated jobs: servers and workers in virtual time, on this machine."""

from __future__ import annotations

import argparse
import os

from torchfleet.errors import RoleError
from torchfleet.launch.job_spec import JobSpec, Task, describe_task
from torchfleet.launch.processes import ROLES
from torchfleet.launch.roles import JobLayout, tasks

_OTHERS = (
    "servers", "workers", "nproc_per_node", "gpus", "nnodes", "master", "rank", "ips", "max_restart", "max_job_restart",
)  # fmt: skip
_FIRST_PORT = 10_000  # of addresses that nobody listens on


class SimulationLauncher:
    """Takes a job with --simulate. The contracts of its methods: launchers.py."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("simulation: a job in virtual time, on this machine").add_argument
        add("--simulate", action="store_true", help="simulate the job")
        add("--link", help="a machine's link to the others: bandwidth and latency (default: 10Gbit,50us)")

    def takes(self, options: argparse.Namespace) -> bool:
        return bool(options.simulate)

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        _, planned = _plan(job)
        return [
            line for task in planned for line in describe_task(task, job.command, f"log: {job.latest / task.log_name}")
        ]

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        from torchfleet.simulate.conditions import Conditions, Job, Part
        from torchfleet.simulate.simulation import Simulation

        layout, planned = _plan(job)
        run_dir = job.make_run_dir()
        print(f"[fleetrun] logs in {run_dir}", flush=True)
        around = {name: value for name, value in os.environ.items() if name not in ROLES}
        parts = [Part(t.role, t.index, {**around, **t.environment}, run_dir / t.log_name) for t in planned]
        simulated = Job(options.script, options.arguments, parts, layout.servers, Conditions())
        return Simulation(simulated, lambda line: print(line, flush=True)).run()


def _plan(job: JobSpec) -> tuple[JobLayout, list[Task]]:
    num_servers = 1 if job.num_servers is None else job.num_servers
    num_workers = 1 if job.num_workers is None else job.num_workers
    servers = tuple(f"127.0.0.1:{_FIRST_PORT + i}" for i in range(num_servers))
    layout = JobLayout(servers, ("127.0.0.1:0",) * num_workers, tuple(range(num_servers)), tuple(range(num_workers)))
    return layout, tasks(layout, num_workers, job.environment)
