"""Which options of fleetrun each kind of job takes. Any other option that is given is refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchfleet.base.errors import RoleError
from torchfleet.base.role.process_settings import DURABILITY, ON_LOSS
from torchfleet.base.role.role_info import LOSS_END
from torchfleet.launch.endurance.placement import REPLICAS
from torchfleet.launch.surroundings import surroundings

RANKS = ("nproc_per_node", "gpus", "nnodes", "master", "rank", "ips")
CONDITIONS = ("link", "straggler", "compute_scale", "step_ms", "jitter", "simulation_seed", "throughput_only")

_ANY = ("module", "script", "arguments", "log_dir", "dry_run")
_COUNTS = ("server_num", "worker_num")
_LISTS = ("servers", "workers", "heter_worker_num", "heter_workers")
_TABLES = ("max_table_bytes", "table_memory", "table_path", "save_root", "orphan_timeout")
_LOGS = ("durability", "log_store", "fsync_ms")
_REPLICAS = ("replicas", "coordinator", "no_wait_for_backups")
_SERVERS = (*_TABLES, *_LOGS, "on_worker_loss", "servers_run_script", "log_max_bytes", "key_dir", "verbose")
_WATCHING = ("metrics_port", "metrics_host", "log_format", "tensorboard", "trace_every", "insecure")
_WORKER_RESOURCES = ("worker_cpus", "worker_memory", "worker_gpus")
_RESOURCES = ("server_cpus", "server_memory", *_WORKER_RESOURCES)
_ON_RAY = ("cluster", "placement", "files", "dashboard", "max_restart")

# Variables by which a user asks for something, by option: the variable, and the value that asks for nothing.
_ASKED = {"durability": (DURABILITY, "none"), "replicas": (REPLICAS, "1"), "on_worker_loss": (ON_LOSS, LOSS_END)}


@dataclass(frozen=True)
class Kind:
    """A kind of job: the options that it takes, and the error for others, in which `{others}` stands for them and
    `{given} {start}` for the options that make the job one of this kind."""

    takes: frozenset[str]
    refusal: str


def _kind(refusal: str, *groups: Sequence[str]) -> Kind:
    return Kind(frozenset(name for group in (_ANY, *groups) for name in group), refusal)


_ONE_KIND = "{given} {start} a collective job, {others} one with parameter servers: use one kind"
_SERVER_JOB = _kind(
    "{others}: not for a job with servers on this machine or on listed ones. Leave it out.",
    _COUNTS, _LISTS, _SERVERS, _REPLICAS, _WATCHING,
    ("private", "plain", "dashboard", "max_restart", "max_job_restart"),
)  # fmt: skip
_RANK_JOB = _kind(_ONE_KIND, RANKS, _WATCHING, ("dashboard", "max_restart"))
_SIMULATION = _kind(
    "--simulate runs a job with servers on this machine alone, given by --server_num and --worker_num: leave {others} "
    "out",
    _COUNTS, _TABLES, CONDITIONS, ("simulate",),
)  # fmt: skip
_RAY_JOB = _kind(
    "{others}: on Ray the cluster places all processes (--cluster ray). Leave it out.",
    _COUNTS, _SERVERS, _REPLICAS, _WATCHING, _RESOURCES, _ON_RAY, ("max_job_restart",),
)  # fmt: skip
_RAY_RANKS = _kind(
    "{others}: not for a collective job on Ray (--cluster ray, {given}). The cluster places all ranks, and there are "
    "no servers. Leave it out.",
    ("nproc_per_node", "nnodes", "log_max_bytes"), _WATCHING, _WORKER_RESOURCES, _ON_RAY,
)  # fmt: skip
_SRUN = (
    "{others}: not for tasks of Slurm (--cluster slurm). srun places and counts the tasks, and Slurm starts a job "
    "again (--requeue). Use the matching options of srun instead."
)
_SLURM_TASK = _kind(_SRUN, _COUNTS, _SERVERS, _WATCHING, ("cluster", "save_on_stop", "requeue"))
_SLURM_RANKS = _kind(_SRUN, ("nproc_per_node", "gpus", "cluster", "requeue", "dashboard"), _WATCHING)


def kind_of(launcher: str, options: argparse.Namespace) -> Kind | None:
    """Return the kind of job that the launcher of this name starts; None for a launcher that is not ours."""
    ranks = _has_ranks(options)
    kinds: Mapping[str, tuple[Kind, Kind]] = {  # without and with ranks
        "servers": (_SERVER_JOB, _SERVER_JOB),
        "ranks": (_RANK_JOB, _RANK_JOB),
        "simulation": (_SIMULATION, _SIMULATION),
        "ray": (_RAY_JOB, _RAY_RANKS),
        "slurm": (_SLURM_TASK, _SLURM_RANKS),
    }
    return kinds[launcher][ranks] if launcher in kinds else None


def refuse_others(kind: Kind, options: argparse.Namespace, said: Mapping[str, str]) -> None:
    """Raise RoleError if options are given, or asked for by a variable, that a job of this kind would ignore. `said`:
    the given options, by the name of their value."""
    others = [option for name, option in said.items() if name not in kind.takes]
    found = surroundings()
    for name, (variable, neutral) in _ASKED.items():
        if name not in kind.takes and found.get(variable, neutral) not in ("", neutral):
            others.append(f"{variable}={found[variable]}")
    if others:
        given = [option for name, option in said.items() if name in RANKS]
        start = "start" if given[1:] else "starts"
        raise RoleError(kind.refusal.format(others=", ".join(others), given=", ".join(given), start=start))


def _has_ranks(options: argparse.Namespace) -> bool:
    return any(getattr(options, name) is not None for name in ("nproc_per_node", "nnodes", "gpus"))
