"""The plan of a collective job: the ranks of this machine, the address of the rendezvous, the ranks' environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.errors import RoleError
from torchfleet.launch import roles
from torchfleet.ps.net.keys import is_private

_PORT = 6170  # of the rendezvous with --ips, unless --master gives another
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class RankPlan:
    """The part of one machine in a collective job."""

    num_ranks: int  # on this machine
    min_machines: int = 1
    max_machines: int = 1
    machine: int | None = 0  # the number of this machine; None: the rendezvous numbers the machines
    host: str = "127.0.0.1"  # of the rendezvous
    port: int = 0  # 0: any free port
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_elastic(self) -> bool:
        return self.machine is None


def make_plan(options: argparse.Namespace) -> RankPlan:
    """Make the plan from the options of the command line. Raises RoleError for invalid options."""
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
            "Give --insecure if no one else uses that network."
        )
    machine = _machine(options.rank, hosts, least, most)
    environment = _environment(num_ranks, gpus, is_private(f"tcp://{_bracketed(host)}:{port}"))
    return RankPlan(num_ranks, least, most, machine, host, port, environment)


def _environment(num_ranks: int, gpus: Sequence[str], is_loopback: bool) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // num_ranks))
    made = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if gpus:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if is_loopback:
        made |= {name: os.environ.get(name, value) for name, value in _LOOPBACK.items()}
    return made


def _gpus(text: str | None) -> list[str]:
    """Return GPU names as CUDA spells them, without duplicates. Raises RoleError for a GPU hidden from the launcher."""
    if text is None:
        return []
    gpus = _list("--gpus", text)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for gpu in gpus:
        if not (gpu.isascii() and gpu.isdigit()) and not gpu.startswith(("GPU-", "MIG-")):
            raise RoleError(f"--gpus expects numbers of GPUs separated by commas, such as 0,1; found {gpu!r}")
        if visible is not None and gpu not in [name.strip() for name in visible.split(",")]:
            raise RoleError(f"--gpus names GPU {gpu}, but CUDA_VISIBLE_DEVICES={visible} hides it")
    return gpus


def require_gpus(text: str | None) -> None:
    """Raise RoleError if --gpus names a GPU that this machine does not have or may not use."""
    if text is None:
        return
    if os.environ.get("FLEET_DEVICE") == "cpu":
        raise RoleError(f"--gpus {text} asks for GPUs, FLEET_DEVICE=cpu keeps the job off them: use one of them")
    import torch

    num = torch.cuda.device_count()  # counts only CUDA_VISIBLE_DEVICES; the names were checked against it
    numbers = [int(gpu) for gpu in _list("--gpus", text) if gpu.isdigit()]
    is_renumbered = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    missing = [number for number in numbers if number >= num and not is_renumbered]
    if not num or missing:
        named = missing[0] if missing else text
        raise RoleError(
            f"--gpus names GPU {named}, but torch finds {num or 'no'} GPU{'s' * (num > 1)} on this machine. Name those "
            "that it has (nvidia-smi), or train on the CPU: FLEET_DEVICE=cpu fleetrun --nproc_per_node N ..."
        )


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
    """Return this machine's number: --rank, or its position in --ips. None for MIN:MAX machines."""
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
    if most == 1 and not hosts:
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
