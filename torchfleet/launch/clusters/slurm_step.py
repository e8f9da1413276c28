"""What Slurm tells a task about its step: which of how many it is, on which nodes, of which job."""

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


def expand_hostlist(text: str) -> list[str]:
    """The names in a list of Slurm's, in their order: n[01-03,7],m5 stands for n01, n02, n03, n7 and m5.

    A number keeps the width that the first one of its range has.
    Raises RoleError for what is no such list, or stands for more than 65,536 names.
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
    """The parts between commas that are in no brackets."""
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
    """What is in brackets and what is not, in their order: of each pair one is empty."""
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
