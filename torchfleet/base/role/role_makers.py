"""Role makers: the role of a process, from its environment or set in its script.

No other module reads roles from the environment. Other variables are read where they are used, such as FLEET_DEVICE in
base/own_device.py.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchfleet.base.errors import RoleError
from torchfleet.base.role.fleet_role import fleet_role
from torchfleet.base.role.named_variables import NamedVariables, endpoints_of
from torchfleet.base.role.process_settings import loss_of, process_settings
from torchfleet.base.role.role_info import HETER_WORKER, SERVER, WORKER, RoleInfo


class AskedRole(ABC):
    """The questions that scripts of Paddle ask a role maker; `fleet` answers the same after fleet.init."""

    @abstractmethod
    def read(self) -> RoleInfo:
        """The role. Raises RoleError if it is not defined unambiguously."""

    def is_server(self) -> bool:
        return self.read().role == SERVER

    def is_worker(self) -> bool:
        return self.read().role == WORKER

    def is_heter_worker(self) -> bool:
        return self.read().role == HETER_WORKER

    def is_first_worker(self) -> bool:
        return self.is_worker() and self.worker_index() == 0

    def worker_index(self) -> int:
        return self.read().worker_index

    def server_index(self) -> int:
        return self.read().server_index

    def worker_num(self) -> int:
        return self.read().num_workers

    def server_num(self) -> int:
        return self.read().num_servers

    def heter_worker_num(self) -> int:
        return len(self.read().heter_endpoints)


class PaddleCloudRoleMaker(AskedRole):
    """The role from the environment: FLEET_* variables, or Paddle's names unchanged.

    FLEET_ROLE                              TRAINING_ROLE
      (WORKER | SERVER | HETER_WORKER)        (TRAINER | PSERVER | HETER_TRAINER)
    FLEET_SERVER_ENDPOINTS                  PADDLE_PSERVERS_IP_PORT_LIST
    FLEET_NUM_WORKERS                       PADDLE_TRAINERS_NUM
    FLEET_WORKER_INDEX                      PADDLE_TRAINER_ID
    FLEET_SERVER_INDEX                      POD_IP and PADDLE_PORT, looked up in the list of servers
    FLEET_WORKER_ENDPOINTS                  PADDLE_TRAINER_ENDPOINTS
    FLEET_HETER_ENDPOINTS                   PADDLE_HETER_TRAINER_IP_PORT_LIST
    FLEET_HETER_INDEX                       POD_IP and PADDLE_PORT, looked up in the list of heter workers
    CPU_NUM: threads of torch; PSERVER_DEBUG=1: print the plan and the servers' tables;
    FLEET_VERBOSE=1: print all settings
    FLEET_RESTART: how often this role was started before, or "ask"
    FLEET_START_TIMEOUT, FLEET_WORKER_TIMEOUT, FLEET_ORPHAN_TIMEOUT: seconds, see RoleInfo
    FLEET_MIN_WORKERS: of an elastic job; FLEET_ON_WORKER_LOSS (end | wait | go_on), see RoleInfo
    FLEET_DURABILITY (none | log), FLEET_LOG_STORE, FLEET_LOG_RUN, FLEET_FSYNC_MS: the servers' logs, see RoleInfo

    For collective training (is_collective=True):
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torch's launchers set them; or
    PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ENDPOINTS (the ranks meet at the first),
    FLAGS_selected_gpus. Without any of them: one rank.
    """

    def __init__(self, is_collective: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment
        self._is_collective = is_collective

    def read(self) -> RoleInfo:
        found = self._environment
        common = {
            "key_dir": found.get("FLEET_KEY_DIR"),
            "insecure": found.get("FLEET_INSECURE", "0") == "1",
            **process_settings(found),
        }
        variables = NamedVariables(found, self._is_collective)
        return _rank_role(variables, common) if self._is_collective else fleet_role(variables, common)


def is_collective_job(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment is that of a rank: it sets a rank or a world size, and no role in a job with servers."""
    found = os.environ if environment is None else environment
    servers = ("FLEET_ROLE", "TRAINING_ROLE", "FLEET_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST")
    ranks = ("RANK", "WORLD_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    return not any(found.get(name) for name in servers) and any(found.get(name) for name in ranks)


class UserDefinedRoleMaker(AskedRole):
    """A role set in code; the names are Paddle's."""

    def __init__(
        self,
        current_id: int = 0,
        role: str = WORKER,
        worker_num: int = 1,
        server_endpoints: Sequence[str] = (),
        worker_endpoints: Sequence[str] = (),
        key_dir: str | None = None,
        insecure: bool = False,
        heter_worker_endpoints: Sequence[str] = (),
    ) -> None:
        if role not in (WORKER, SERVER, HETER_WORKER):
            raise RoleError(f"role must be 'worker', 'server' or 'heter_worker', found {role!r}")
        if worker_num < 1:
            raise RoleError(f"worker_num must be at least 1, found {worker_num}")
        if worker_endpoints and len(worker_endpoints) != worker_num:
            raise RoleError(f"worker_endpoints lists {len(worker_endpoints)} workers, but worker_num is {worker_num}")
        limits = {WORKER: worker_num, SERVER: len(server_endpoints), HETER_WORKER: len(heter_worker_endpoints)}
        limit = limits[role]
        if not 0 <= current_id < max(1, limit):
            raise RoleError(f"current_id is {current_id}, but there are {limit} {role}s, numbered from 0")
        if not server_endpoints and (role != WORKER or worker_num > 1 or heter_worker_endpoints):
            raise RoleError(f"server_endpoints is empty: a {role} of a fleet needs the addresses of all servers")
        self._info = RoleInfo(
            role,
            current_id if role == WORKER else 0,
            worker_num,
            current_id if role == SERVER else 0,
            endpoints_of(",".join(server_endpoints), "server_endpoints"),
            endpoints_of(",".join(worker_endpoints), "worker_endpoints"),
            key_dir,
            insecure,
            heter_endpoints=endpoints_of(",".join(heter_worker_endpoints), "heter_worker_endpoints"),
            heter_index=current_id if role == HETER_WORKER else 0,
        )

    def read(self) -> RoleInfo:
        key_dir = self._info.key_dir or os.environ.get("FLEET_KEY_DIR")
        loss = loss_of(os.environ, self._info.num_workers)
        return replace(self._info, key_dir=key_dir, **process_settings(os.environ), **loss)


def _rank_role(variables: NamedVariables, common: dict[str, Any]) -> RoleInfo:
    """The role of a process in a collective job; without ranks in the environment, that of a single rank.

    `common`: fields of RoleInfo that do not depend on the role.
    """
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
        master = ""  # torch itself reads MASTER_ADDR and MASTER_PORT
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
    """Ranks on this machine: as the launcher says, or the number of workers with its address; 0 if unknown."""
    if variables.environment.get("LOCAL_WORLD_SIZE"):
        return variables.number("LOCAL_WORLD_SIZE", at_least=1)
    host = own.rpartition(":")[0]
    return sum(worker.rpartition(":")[0] == host for worker in workers)
