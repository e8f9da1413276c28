"""The role of a process in a job with servers, from its environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchfleet.base.errors import RoleError
from torchfleet.base.role.named_variables import NamedVariables
from torchfleet.base.role.process_settings import loss_of
from torchfleet.base.role.role_info import HETER_WORKER, SERVER, WORKER, RoleInfo

HETER_PLACES = ("FLEET_HETER_ENDPOINTS", "PADDLE_HETER_TRAINER_IP_PORT_LIST", "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST")
ASK = "ask"  # value of FLEET_RESTART: the servers know how often a worker was started before


def fleet_role(variables: NamedVariables, common: dict[str, Any]) -> RoleInfo:
    """Read the role. `common`: fields of RoleInfo that do not depend on the role. Without a role: one local worker."""
    found = variables.environment
    role = _role(variables)
    if role is None:
        _refuse_fleet_without_role(variables)
        return RoleInfo(**common)
    servers = variables.endpoints("FLEET_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST")
    if not servers:
        raise RoleError("FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST lists no address")
    num_workers = variables.number("FLEET_NUM_WORKERS", "PADDLE_TRAINERS_NUM", at_least=1)
    names = ("FLEET_WORKER_ENDPOINTS", "PADDLE_TRAINER_ENDPOINTS")
    workers = variables.endpoints(*names) if any(found.get(name) for name in names) else ()
    if workers and len(workers) != num_workers:
        raise RoleError(
            f"FLEET_WORKER_ENDPOINTS / PADDLE_TRAINER_ENDPOINTS lists {len(workers)} workers, but "
            f"FLEET_NUM_WORKERS / PADDLE_TRAINERS_NUM says {num_workers}. Make them agree."
        )
    worker = variables.number("FLEET_WORKER_INDEX", "PADDLE_TRAINER_ID") if role == WORKER else 0
    if worker >= num_workers:
        raise RoleError(
            f"FLEET_WORKER_INDEX / PADDLE_TRAINER_ID is {worker}, but there are {num_workers} workers, numbered from 0"
        )
    server = _server_index(variables, servers) if role == SERVER else 0
    common |= _heter(variables, role)
    asks = found.get("FLEET_RESTART") == ASK
    restart = variables.number("FLEET_RESTART") if "FLEET_RESTART" in found and not asks else 0
    if role == SERVER:
        common |= _replica(variables, servers[server])
    common |= loss_of(found, num_workers)
    common["asks_restart"] = asks and role == WORKER
    return RoleInfo(role, worker, num_workers, server, servers, workers, restart=restart, **common)


def _role(variables: NamedVariables) -> str | None:
    values = [value for name in ("FLEET_ROLE", "TRAINING_ROLE") if (value := variables.environment.get(name))]
    if not values:
        return None
    value = values[0]
    known = {"WORKER": WORKER, "TRAINER": WORKER, "SERVER": SERVER, "PSERVER": SERVER}
    known |= {"HETER_WORKER": HETER_WORKER, "HETER_TRAINER": HETER_WORKER}
    if value.upper() not in known:
        raise RoleError(f"FLEET_ROLE / TRAINING_ROLE is {value!r}; expected one of {', '.join(known)}")
    if len({known.get(value.upper(), value) for value in values}) > 1:
        raise RoleError(f"FLEET_ROLE is {values[0]!r} and TRAINING_ROLE is {values[1]!r}: set one of them")
    return known[value.upper()]


def _refuse_fleet_without_role(variables: NamedVariables) -> None:
    """Raise RoleError if variables name other processes, but no role: training alone would be a silent mistake."""
    for name, missing, alone in (
        ("FLEET_SERVER_ENDPOINTS", "FLEET_ROLE", ""),
        ("PADDLE_PSERVERS_IP_PORT_LIST", "TRAINING_ROLE", ""),
        ("FLEET_NUM_WORKERS", "FLEET_ROLE", "1"),
        ("PADDLE_TRAINERS_NUM", "TRAINING_ROLE", "1"),
        ("FLEET_WORKER_INDEX", "FLEET_ROLE", "0"),
        ("PADDLE_TRAINER_ID", "TRAINING_ROLE", "0"),
        ("WORLD_SIZE", "FLEET_ROLE", "1"),  # a script for a job with servers, started by torchrun
    ):
        value = variables.environment.get(name)
        if value and value != alone:
            raise RoleError(
                f"{name}={value} is set, but {missing} is missing. Set it, or start with fleetrun; to train alone, "
                f"remove {name}; for collective training call fleet.init(is_collective=True)."
            )


def _server_index(variables: NamedVariables, servers: Sequence[str]) -> int:
    return _index(variables, "FLEET_SERVER_INDEX", servers, "server")


def _heter(variables: NamedVariables, role: str) -> dict[str, Any]:
    """The addresses of the heter workers, if the job has any, and the index of this heter worker."""
    if role != HETER_WORKER and not any(variables.environment.get(name) for name in HETER_PLACES):
        return {}
    places = variables.endpoints(*HETER_PLACES)
    index = _index(variables, "FLEET_HETER_INDEX", places, "heter worker") if role == HETER_WORKER else 0
    return {"heter_endpoints": places, "heter_index": index}


def _index(variables: NamedVariables, name: str, places: Sequence[str], what: str) -> int:
    """The index of this process among those of its role: as `name` says, or by its own address."""
    if variables.environment.get(name):
        index = variables.number(name)
        if index >= len(places):
            raise RoleError(f"{name} is {index}, but the list of {what}s has {len(places)}")
        return index
    own = f"{variables.get('POD_IP', name)}:{variables.get('PADDLE_PORT')}"
    if own not in places:
        raise RoleError(f"this {what} is {own} by POD_IP and PADDLE_PORT, which is not in the list {', '.join(places)}")
    return places.index(own)


def _replica(variables: NamedVariables, places: str) -> dict[str, Any]:
    """Which replica of its shard this server is, and the address of the coordinator, which chooses the primary."""
    num = len(places.split("|"))
    replica = variables.number("FLEET_REPLICA") if variables.environment.get("FLEET_REPLICA") else 0
    if replica >= num:
        raise RoleError(f"FLEET_REPLICA is {replica}, but this server has the addresses {places}: 0 is the first")
    coordinator = variables.environment.get("FLEET_COORDINATOR")
    if num > 1 and not coordinator:
        raise RoleError(
            f"this server has replicas ({places}), but FLEET_COORDINATOR is missing, which decides which of them "
            "is primary: set it to etcd://host:port/NAME, or start with fleetrun --replicas 2"
        )
    return {"replica": replica, "coordinator": coordinator if num > 1 else None}
