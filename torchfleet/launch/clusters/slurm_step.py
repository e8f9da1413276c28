"""What Slurm tells a task about its step: which of how many it is, on which nodes, of which job."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.slurm_hostlist import expand_hostlist

_NUMBER = re.compile(r"[0-9]{1,18}")
_DISCARD = 9  # a port; nothing is sent there


@dataclass(frozen=True)
class SlurmStep:
    """One task of a step. In a heterogeneous step ranks go through all components, the first one first."""

    job: int  # of heterogeneous components, that of the first one
    step: int
    restart: int  # how often the job was requeued
    rank: int
    num_tasks: int
    nodes: tuple[str, ...]
    node: str
    components: tuple[int, ...]  # tasks of each; empty: the job is not heterogeneous
    cores: int  # of a task

    @property
    def name(self) -> str:
        """Unlike that of any other step of this cluster, and of this one before it was requeued."""
        return f"slurm-{self.job}.{self.step}{f'-{self.restart}' if self.restart else ''}"

    def own_address(self) -> str:
        """The address by which the other nodes of the step reach this one; of a single node: loopback.

        Not that of this node's name: on many systems it leads back to the node itself.
        """
        others = [node for node in self.nodes if node != self.node]
        if not others:
            return "127.0.0.1"
        for target in (*others, socket.gethostname()):
            try:
                kind, _, _, _, place = socket.getaddrinfo(target, _DISCARD, type=socket.SOCK_DGRAM)[0]
                with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                    probe.connect(place)  # sends nothing: the kernel chooses the interface
                    return str(probe.getsockname()[0])
            except OSError:
                continue
        raise RoleError(
            f"none of the nodes {', '.join(others)} has an address that is known here ({self.node}), nor has this host"
        )


def read_step(found: Mapping[str, str]) -> SlurmStep:
    """The step of this environment. Raises RoleError if it is none."""
    if not found.get("SLURM_STEP_ID") or not found.get("SLURM_PROCID"):
        raise RoleError(
            "--cluster slurm: this process is no task of a step of Slurm (SLURM_STEP_ID and SLURM_PROCID are not set). "
            "Start it with srun, one task for each server and worker: srun --ntasks 6 fleetrun --cluster slurm "
            "--server_num 2 --worker_num 4 train.py"
        )
    sizes = _number(found, "SLURM_HET_SIZE", 0)
    rank = _number(found, "SLURM_PROCID")
    components = tuple(_number(found, f"SLURM_NTASKS_HET_GROUP_{group}") for group in range(sizes))
    num_tasks = _number(found, "SLURM_STEP_NUM_TASKS")
    if sum(components) != num_tasks:  # the step is of one component alone
        components = ()
    return SlurmStep(
        job=_number(found, "SLURM_JOB_ID_HET_GROUP_0" if components else "SLURM_JOB_ID"),
        step=_number(found, "SLURM_STEP_ID"),
        restart=_number(found, "SLURM_RESTART_COUNT", 0),
        rank=rank,
        num_tasks=num_tasks,
        nodes=tuple(expand_hostlist(found.get("SLURM_STEP_NODELIST") or found.get("SLURM_JOB_NODELIST") or "")),
        node=found.get("SLURMD_NODENAME") or socket.gethostname(),
        components=components,
        cores=_cores(found, rank, components),
    )


def _cores(found: Mapping[str, str], rank: int, components: tuple[int, ...]) -> int:
    """What Slurm gives a task: one core, unless it was asked for more."""
    for group, num in enumerate(components):
        if rank < num:
            return _number(found, f"SLURM_CPUS_PER_TASK_HET_GROUP_{group}", _number(found, "SLURM_CPUS_PER_TASK", 1))
        rank -= num
    return _number(found, "SLURM_CPUS_PER_TASK", 1)


def _number(found: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = found.get(name) or ("" if default is None else str(default))
    if not _NUMBER.fullmatch(text):
        raise RoleError(f"{name} must be a number, as Slurm sets it; found {text!r}")
    return int(text)
