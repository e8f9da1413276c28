"""The role of a process in a collective job, from its environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchfleet.base.errors import RoleError
from torchfleet.base.role.named_variables import NamedVariables
from torchfleet.base.role.role_info import WORKER, RoleInfo


def rank_role(variables: NamedVariables, common: dict[str, Any]) -> RoleInfo:
    """`common`: what every process is told, beside its role. Without ranks in the environment: one."""
    found = variables.environment
    if found.get("FLEET_SERVER_ENDPOINTS") or found.get("PADDLE_PSERVERS_IP_PORT_LIST"):
        raise RoleError(
            "is_collective=True, but this process was started with servers (--server_num, --servers, or "
            "TRAINING_ROLE). Start it with `fleetrun --nproc_per_node N`, or leave is_collective out."
        )
    if not any(found.get(name) for name in ("RANK", "WORLD_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")):
        return RoleInfo(is_collective=True, local_size=1, **common)
    size = variables.number("WORLD_SIZE", "PADDLE_TRAINERS_NUM", at_least=1)
    rank = variables.number("RANK", "PADDLE_TRAINER_ID")
    if rank >= size:
        raise RoleError(f"RANK / PADDLE_TRAINER_ID is {rank}, but there are {size} ranks, numbered from 0")
    workers: tuple[str, ...] = ()
    if found.get("MASTER_ADDR") or size == 1:
        if found.get("MASTER_ADDR") and not found.get("MASTER_PORT"):
            raise RoleError("MASTER_ADDR is set, but MASTER_PORT is missing. Set it, or start with fleetrun.")
        master = ""  # torch reads these two itself
    else:
        workers = variables.endpoints("PADDLE_TRAINER_ENDPOINTS")
        if len(workers) != size:
            raise RoleError(
                f"PADDLE_TRAINER_ENDPOINTS lists {len(workers)} ranks, but WORLD_SIZE / PADDLE_TRAINERS_NUM says "
                f"{size}. Make them agree."
            )
        master = workers[0]
    gpu = found.get("FLAGS_selected_gpus") or "0"
    if not (gpu.isascii() and gpu.isdigit()):
        raise RoleError(f"FLAGS_selected_gpus must be one number, that of this rank's GPU, found {gpu!r}")
    local = variables.number("LOCAL_RANK") if found.get("LOCAL_RANK") else int(gpu)
    more: dict[str, Any] = {"is_collective": True, "local_rank": local, "master": master}
    more["local_size"] = _local_size(variables, workers[rank] if workers else "", workers)
    restart = variables.number("TORCHELASTIC_RESTART_COUNT") if found.get("TORCHELASTIC_RESTART_COUNT") else 0
    return RoleInfo(WORKER, rank, size, worker_endpoints=workers, restart=restart, **more, **common)


def _local_size(variables: NamedVariables, own: str, workers: Sequence[str]) -> int:
    """Ranks of this machine: as the launcher says, or as many as have its address; 0 if neither is there."""
    if variables.environment.get("LOCAL_WORLD_SIZE"):
        return variables.number("LOCAL_WORLD_SIZE", at_least=1)
    host = own.rpartition(":")[0]
    return sum(worker.rpartition(":")[0] == host for worker in workers)
