"""The launcher of collective jobs: the ranks of this machine, run by torch's elastic agent."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator

from torchfleet.base.errors import RoleError
from torchfleet.launch.job_spec import JobSpec, Task, describe_settings, describe_task
from torchfleet.launch.ranks.rank_plan import RankPlan, make_plan, require_gpus
from torchfleet.launch.taken_options import RANKS
from torchfleet.observe.watch.json_display import line_printer
from torchfleet.observe.watch.metrics_ports import check_free, port_variables, tell_targets


class RankLauncher:
    """Takes a job with any option of its own. The contracts of its methods: launchers.py."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("collective jobs: ranks without servers").add_argument
        add("--nproc_per_node", type=int, help="ranks on this machine")
        add("--gpus", help="one rank per named GPU, separated by commas: 0,1")
        add("--nnodes", help="machines of a collective job: a number, or MIN:MAX of them, which come and go")
        add("--master", help="host:port where these machines meet; the host is machine 0")
        add("--rank", type=int, help="the number of this machine, from 0")
        add("--ips", help="all machines of a collective job, separated by commas; machine 0 is the first")

    def takes(self, options: argparse.Namespace) -> bool:
        given = [f"--{name}" for name in RANKS if getattr(options, name) is not None]
        if given and options.key_dir and options.key_dir != os.environ.get("FLEET_KEY_DIR"):
            raise RoleError(
                f"--key_dir is for parameter servers: torch.distributed, which {given[0]} uses, has no keys"
            )
        return bool(given)

    def describe(self, job: JobSpec, options: argparse.Namespace, meeting: str = "") -> list[str]:
        """`meeting`: where machines meet, if that is not known before they start."""
        plan = _plan(job, options)
        notes = _notes(job, plan, meeting)
        ranks = [line for local in range(plan.num_ranks) for line in _describe_rank(job, plan, local, notes)]
        return [*describe_settings(job), *ranks]

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        plan = _plan(job, options)
        require_gpus(options.gpus)
        check_free(job.watching, plan.num_ranks)
        run_dir = job.make_run_dir()
        ports = {f"local rank {i}": port_variables(job.watching, i) for i in range(plan.num_ranks)}
        say = line_printer(job.watching)
        for line in filter(None, (f"logs in {run_dir}", tell_targets(run_dir, ports))):
            say(f"[fleetrun] {line}")
        from torchfleet.launch.ranks.elastic import run  # imports torch, which the other launchers do not need

        return run(job, plan, run_dir)


def _plan(job: JobSpec, options: argparse.Namespace) -> RankPlan:
    plan = make_plan(options)
    return dataclasses.replace(plan, environment={**plan.environment, **job.telling_variables})


def _notes(job: JobSpec, plan: RankPlan, meeting: str) -> str:
    """Return what --dry_run says beside the log of a rank: where machines meet, and that there are no keys."""
    place = meeting or f"{plan.host}:{plan.port}"
    notes = [f"; machines meet at {place}"] if plan.port else []
    return "".join([*notes, "; insecure: other machines are talked to without keys"] if job.insecure else notes)


def _describe_rank(job: JobSpec, plan: RankPlan, local_rank: int, notes: str) -> Iterator[str]:
    variables = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(plan.num_ranks)}
    variables |= port_variables(job.watching, local_rank)
    if plan.is_elastic:
        task = Task("local rank", local_rank, {**variables, **plan.environment})
        machines = f"{plan.min_machines} to {plan.max_machines} machines: ranks are numbered when they meet"
        yield from describe_task(task, job.command, f"{machines}; logs: {job.latest}/workerlog.RANK{notes}")
        return
    rank = (plan.machine or 0) * plan.num_ranks + local_rank  # if all machines have the same number of ranks
    world_size = plan.max_machines * plan.num_ranks
    variables |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": plan.host}
    variables |= {"MASTER_PORT": "(a free one, for every start)", **plan.environment}
    task = Task("rank", rank, variables)
    yield from describe_task(task, job.command, f"log: {job.latest / task.log_name}{notes}")
