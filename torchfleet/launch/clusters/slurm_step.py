"""What Slurm tells a task about its step: its rank, the number of tasks, the nodes and the job."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from torchfleet.base.errors import RoleError

_MOST_HOSTS = 1 << 16  # of a list
_NUMBER = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PART = re.compile(r"\[([^][]*)\]|([^][]+)")
_DISCARD = 9  # the discard port; nothing is sent to it


@dataclass(frozen=True)
class SlurmStep:
    """One task of a step. In a heterogeneous step, ranks count through all components in order."""

    job: int  # of a heterogeneous job: the id of its first component
    step: int
    restart: int  # how many times the job was requeued
    rank: int
    num_tasks: int
    nodes: tuple[str, ...]
    node: str
    components: tuple[int, ...]  # number of tasks of each; empty: the job is not heterogeneous
    cores: int  # of a task

    @property
    def name(self) -> str:
        """A name that is unique in the cluster; it changes when the job is requeued."""
        return f"slurm-{self.job}.{self.step}{f'-{self.restart}' if self.restart else ''}"

    def own_address(self) -> str:
        """Return the address by which the other nodes of the step reach this one; loopback if there is only one node.

        It does not resolve this node's own name: on many systems that gives a loopback address.
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
    """Read the step from an environment. Raises RoleError if it does not describe one."""
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
    if sum(components) != num_tasks:  # the step runs on one component only
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


def refuse_copies(found: Mapping[str, str]) -> None:
    """Raise RoleError if this is one of several tasks that srun has started: each would start the whole job.

    A batch script, a shell in an allocation and `srun --pty` have one process, and may start a job on their node.
    """
    if not found.get("SLURM_STEP_ID") or not found.get("SLURM_PROCID"):
        return
    num_tasks = _number(found, "SLURM_STEP_NUM_TASKS", 1)
    if num_tasks > 1:
        raise RoleError(
            f"srun has started fleetrun as task {_number(found, 'SLURM_PROCID')} of {num_tasks}, and each task would "
            "start the whole job. Add --cluster slurm: every task then becomes one server or worker. If every task is "
            "to start a job of its own, hide the step from it: srun env -u SLURM_STEP_ID fleetrun ..."
        )


def _cores(found: Mapping[str, str], rank: int, components: tuple[int, ...]) -> int:
    """Return the number of cores that Slurm gives a task: one by default."""
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


def expand_hostlist(text: str) -> list[str]:
    """Expand a hostlist of Slurm in order: n[01-03,7],m5 gives n01, n02, n03, n7 and m5.

    The numbers of a range are padded to the width of its first number.
    Raises RoleError for an invalid list, and for more than 65,536 names.
    """
    hosts: list[str] = []
    for item in _items(text):
        choices = [_numbers(inside, text) if inside else [plain] for inside, plain in _parts(item, text)]
        num = len(hosts)
        for choice in choices:
            num = min(_MOST_HOSTS + 1, max(1, num - len(hosts)) * len(choice) + len(hosts))
        if num > _MOST_HOSTS:
            raise RoleError(f"the list of hosts {text[:80]!r} stands for more than {_MOST_HOSTS:,} names")
        hosts += ("".join(parts) for parts in itertools.product(*choices))
    return hosts


def _items(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    items, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    if not all(items):
        raise RoleError(f"expected a list of hosts such as n[01-03,7],m5; found {text[:80]!r}")
    return items


def _parts(item: str, text: str) -> list[tuple[str, str]]:
    """Split into pairs (text inside brackets, text outside brackets), in order; one of each pair is empty."""
    found = [(match[1] or "", match[2] or "") for match in _PART.finditer(item)]
    if "".join(f"[{inside}]" if inside else plain for inside, plain in found) != item:
        raise RoleError(f"brackets do not fit in the list of hosts {text[:80]!r}, at {item[:40]!r}")
    return found


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for each in inside.split(","):
        match = _RANGE.fullmatch(each)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + _MOST_HOSTS:
            raise RoleError(f"expected numbers such as 01-03,7 in brackets, found {each[:40]!r} in {text[:80]!r}")
        numbers += (str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers
