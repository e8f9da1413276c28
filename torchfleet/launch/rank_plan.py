"""The command line of collective jobs: which ranks this machine has, where machines meet, what the ranks are told."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchfleet.errors import RoleError
from torchfleet.launch import roles
from torchfleet.net.keys import is_private

FLAGS = ("nproc_per_node", "gpus", "nnodes", "master", "rank", "ips")
_OF_SERVERS = ("server_num", "worker_num", "servers", "workers")
_PORT = 6170  # with --ips, unless --master says another
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Plan:
    """A collective job as one machine sees it."""

    num_ranks: int  # of this machine
    least: int = 1  # machines
    most: int = 1
    machine: int | None = 0  # this one's number; None: it gets one when the machines meet
    host: str = "127.0.0.1"
    port: int = 0  # any
    max_restart: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_elastic(self) -> bool:
        return self.machine is None


def is_asked(options: argparse.Namespace) -> bool:
    """Whether the command line is that of a collective job. Flags of both kinds of jobs are an error."""
    given = [f"--{name}" for name in FLAGS if getattr(options, name) is not None]
    others = [f"--{name}" for name in _OF_SERVERS if getattr(options, name) is not None]
    others += ["--max_job_restart"] if options.max_job_restart else []
    if given and others:
        raise RoleError(
            f"{', '.join(given)} start a collective job, {', '.join(others)} one with parameter servers: use one kind"
        )
    if given and options.key_dir and options.key_dir != os.environ.get("FLEET_KEY_DIR"):
        raise RoleError(f"--key_dir is for parameter servers: torch.distributed, which {given[0]} uses, has no keys")
    return bool(given)


def make_plan(options: argparse.Namespace) -> Plan:
    gpus = _gpus(options.gpus)
    num_ranks = _num_ranks(options.nproc_per_node, gpus)
    least, most = _machines(options.nnodes)
    hosts = _list("--ips", options.ips) if options.ips is not None else []
    if hosts:
        if options.nnodes is not None and (least, most) != (len(hosts), len(hosts)):
            raise RoleError(f"--ips lists {len(hosts)} machines, --nnodes says {options.nnodes}: make them agree")
        least = most = len(hosts)
    host, port = _place(options.master, hosts, most)
    if not options.insecure and not is_private(f"tcp://{_bracketed(host)}:{port}"):
        raise RoleError(
            f"the machines would meet at {host}:{port}, which other machines can reach, and torch.distributed neither "
            "encrypts nor authenticates: everyone on that network could read and change the training, and run code. "
            "Say --insecure if nobody else is on it."
        )
    machine = _machine(options.rank, hosts, least, most)
    environment = _environment(num_ranks, gpus, is_private(f"tcp://{_bracketed(host)}:{port}"))
    return Plan(num_ranks, least, most, machine, host, port, options.max_restart, environment)


def describe(plan: Plan, command: Sequence[str], log_dir: Path) -> list[str]:
    """What would be started, in lines."""
    lines = []
    for local in range(plan.num_ranks):
        rank = (plan.machine or 0) * plan.num_ranks + local  # if all machines have as many
        given = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(plan.num_ranks)}
        if plan.is_elastic:
            numbers = f"{plan.least} to {plan.most} machines: ranks are numbered when they meet"
            lines.append(f"local rank {local}: {' '.join(command)}   ({numbers}; logs: {log_dir}/workerlog.RANK)")
        else:
            lines.append(f"rank {rank}: {' '.join(command)}   (log: {log_dir / f'workerlog.{rank}'})")
            given |= {"RANK": str(rank), "WORLD_SIZE": str(plan.most * plan.num_ranks), "MASTER_ADDR": plan.host}
            given["MASTER_PORT"] = "(a free one, for every start)"
        lines += [f"    {name}={value}" for name, value in {**given, **plan.environment}.items()]
    return lines


def _environment(num_ranks: int, gpus: Sequence[str], is_loopback: bool) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // num_ranks))
    made = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if gpus:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if is_loopback:
        made |= {name: os.environ.get(name, value) for name, value in _LOOPBACK.items()}
    return made


def _gpus(text: str | None) -> list[str]:
    """Names of GPUs as CUDA has them, each once; one that the launcher itself may not see is refused."""
    if text is None:
        return []
    gpus = _list("--gpus", text)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for gpu in gpus:
        if not (gpu.isascii() and gpu.isdigit()) and not gpu.startswith(("GPU-", "MIG-")):
            raise RoleError(f"--gpus expects numbers of GPUs separated by commas, such as 0,1; found {gpu!r}")
        if visible is not None and gpu not in [one.strip() for one in visible.split(",")]:
            raise RoleError(f"--gpus names GPU {gpu}, but CUDA_VISIBLE_DEVICES={visible} hides it")
    return gpus


def _num_ranks(asked: int | None, gpus: Sequence[str]) -> int:
    if asked is not None and asked < 1:
        raise RoleError(f"--nproc_per_node must be at least 1, found {asked}")
    if gpus and asked is not None and asked != len(gpus):
        raise RoleError(f"--nproc_per_node {asked} and --gpus {','.join(gpus)} differ: there is one rank per named GPU")
    return asked or len(gpus) or _num_gpus()


def _num_gpus() -> int:
    """One rank per GPU of this machine, or one on the CPU."""
    import torch

    return 1 if os.environ.get("FLEET_DEVICE") == "cpu" else max(1, torch.cuda.device_count())


def _machines(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise RoleError(f"--nnodes expects a number of machines or MIN:MAX, found {text!r}")
    least, most = int(parts[0]), int(parts[-1])
    if not 1 <= least <= most:
        raise RoleError(f"--nnodes must be at least 1, MIN not more than MAX; found {text!r}")
    return least, most


def _place(master: str | None, hosts: Sequence[str], most: int) -> tuple[str, int]:
    if master is None:
        if most > 1 and not hosts:
            raise RoleError("--nnodes of more than one machine needs --master host:port, where they meet")
        return (hosts[0], _PORT) if len(hosts) > 1 else ("127.0.0.1", 0)
    host, _, port = master.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) < 1 << 16):
        raise RoleError(f"--master expects host:port, found {master!r}")
    host = host.strip("[]")
    return "127.0.0.1" if host == "localhost" else host, int(port)


def _machine(rank: int | None, hosts: Sequence[str], least: int, most: int) -> int | None:
    """This machine's number: as --rank says, or as its place in --ips. None for MIN:MAX machines."""
    if least != most:
        if rank is not None:
            raise RoleError(
                f"--rank {rank} and --nnodes {least}:{most}: machines that come and go have no fixed number"
            )
        return None
    if rank is not None:
        if not 0 <= rank < most:
            raise RoleError(f"--rank must be the number of this machine, 0 to {most - 1}; found {rank}")
        return rank
    if most == 1:
        return 0
    if not hosts:
        raise RoleError(f"--nnodes {most} needs --rank, the number of this machine (0 to {most - 1}), or --ips")
    own = roles.own_addresses()
    here = [number for number, host in enumerate(hosts) if roles.is_here(f"{_bracketed(host)}:0", own)]
    if len(here) != 1:
        found = "none of them" if not here else " and ".join(hosts[number] for number in here)
        raise RoleError(
            f"--ips {','.join(hosts)}: exactly one should be this machine ({', '.join(sorted(own))}), found {found}. "
            "Name it by one of these, set POD_IP to the name it has in the list, or give its number with --rank."
        )
    return here[0]


def _list(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise RoleError(f"{option} lists nothing, found {text!r}")
    if len(set(parts)) != len(parts):
        raise RoleError(f"{option} names something twice, found {text!r}")
    return parts


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
