"""The role of this process in its job: worker or server, its index, and the addresses of all others.

No other module reads roles from the environment. Variables about something else are read where they are used, such as
FLEET_DEVICE in collective/world.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchfleet.errors import RoleError

WORKER, SERVER = "worker", "server"
MAX_SECONDS = 7 * 24 * 3600.0
MAX_FSYNC_MS = 60_000.0
SETTINGS = ("none", "log")  # of FLEET_DURABILITY
LOSS_END, LOSS_WAIT, GO_ON = "end", "wait", "go_on"
LOSS_RULES = (LOSS_END, LOSS_WAIT, GO_ON)  # of FLEET_ON_WORKER_LOSS
ON_LOSS, MIN_WORKERS = "FLEET_ON_WORKER_LOSS", "FLEET_MIN_WORKERS"
DURABILITY, LOG_STORE, LOG_RUN, FSYNC = "FLEET_DURABILITY", "FLEET_LOG_STORE", "FLEET_LOG_RUN", "FLEET_FSYNC_MS"
ASK = "ask"  # of FLEET_RESTART: the servers know how often a worker was started before
_NUMBER = re.compile(r"[0-9]{1,18}")  # longer ones may be more than int() takes


@dataclass(frozen=True)
class RoleInfo:
    """The role, the index and the addresses of all processes. Without servers: one local worker."""

    role: str = WORKER
    worker_index: int = 0
    num_workers: int = 1  # of an elastic job: the most
    server_index: int = 0
    server_endpoints: tuple[str, ...] = ()
    worker_endpoints: tuple[str, ...] = ()
    key_dir: str | None = None
    insecure: bool = False
    socket_dir: str | None = None  # the servers' sockets are files in it, and their addresses only names
    address_book: str | None = None  # a file that says where servers are now that moved
    status_file: str | None = None
    restart: int = 0  # how often this role was started before
    asks_restart: bool = False  # nobody here knows that: the servers are asked
    start_timeout: float = 1800.0  # seconds that a worker waits for a server that gives no sign
    worker_timeout: float = 10.0  # seconds of silence after which those who wait for a worker are told
    orphan_timeout: float = 1800.0  # seconds after the last sign of any worker when a server ends; 0: never
    min_workers: int = 0  # of an elastic job: so many begin, others come and go; 0: the number of workers is fixed
    on_worker_loss: str = LOSS_END  # what the loss of a worker means to those who wait for it: one of LOSS_RULES
    durability: str = "none"  # how servers keep what they promise: "none", or "log" on disk
    log_store: str | None = None  # folder of the servers' logs
    log_run: str = ""  # the run of a launcher that servers belong to; another one's workers are not waited for
    fsync_ms: float = 10.0  # changes that a loss of power may take; 0: none
    save_on_stop: str | None = None  # where worker 0 saves when the job is asked to end
    debug: bool = False
    verbose: bool = False  # tell every setting, not only those that differ from their defaults
    num_threads: int = 0  # of torch; 0: as torch decides
    is_collective: bool = False
    local_rank: int = 0  # among the ranks of this machine
    local_size: int = 0  # ranks of this machine; 0: not known
    replica: int = 0  # of a server: which of the addresses of its shard is its own
    coordinator: str | None = None  # of servers with replicas: where it is decided which is primary
    master: str = ""  # host:port where the ranks of a collective job meet; "": as MASTER_ADDR and MASTER_PORT say

    @property
    def is_local(self) -> bool:
        """Whether one process does everything, with the servers inside it."""
        return not self.server_endpoints and not self.is_collective

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go."""
        return self.min_workers > 0

    @property
    def num_servers(self) -> int:
        return max(1, len(self.server_endpoints))

    @property
    def server_places(self) -> list[str]:
        """host:port of every process that is a server, those that begin as backups included."""
        return [place for shard in self.server_endpoints for place in shard.split("|")]

    @property
    def replica_places(self) -> list[str]:
        """Of a server: host:port of all replicas of its shard; one if it has no backup."""
        return self.server_endpoints[self.server_index].split("|")


class PaddleCloudRoleMaker:
    """The role from the environment: FLEET_* variables, or Paddle's names as they are.

    FLEET_ROLE (WORKER | SERVER)            TRAINING_ROLE (TRAINER | PSERVER)
    FLEET_SERVER_ENDPOINTS                  PADDLE_PSERVERS_IP_PORT_LIST
    FLEET_NUM_WORKERS                       PADDLE_TRAINERS_NUM
    FLEET_WORKER_INDEX                      PADDLE_TRAINER_ID
    FLEET_SERVER_INDEX                      POD_IP and PADDLE_PORT, looked up in the list of servers
    FLEET_WORKER_ENDPOINTS                  PADDLE_TRAINER_ENDPOINTS
    CPU_NUM: threads of torch; PSERVER_DEBUG=1: print the plan and the servers' tables;
    FLEET_VERBOSE=1: print all settings
    FLEET_RESTART: how often this role was started before, or "ask"
    FLEET_START_TIMEOUT, FLEET_WORKER_TIMEOUT, FLEET_ORPHAN_TIMEOUT: seconds, see RoleInfo
    FLEET_MIN_WORKERS: of an elastic job; FLEET_ON_WORKER_LOSS (end | wait | go_on), see RoleInfo
    FLEET_DURABILITY (none | log), FLEET_LOG_STORE, FLEET_LOG_RUN, FLEET_FSYNC_MS: the servers' logs, see RoleInfo

    For collective training (is_collective=True):
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torch's launchers set them; or
    PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ENDPOINTS (the first is where they meet),
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
            **_process_settings(found),
        }
        if self._is_collective:
            return self._collective(common)
        role = self._role()
        if role is None:
            self._refuse_fleet_without_role()
            return RoleInfo(**common)
        servers = self._endpoints("FLEET_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST")
        if not servers:
            raise RoleError("FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST lists no address")
        num_workers = self._number("FLEET_NUM_WORKERS", "PADDLE_TRAINERS_NUM", at_least=1)
        names = ("FLEET_WORKER_ENDPOINTS", "PADDLE_TRAINER_ENDPOINTS")
        workers = self._endpoints(*names) if any(found.get(name) for name in names) else ()
        if workers and len(workers) != num_workers:
            raise RoleError(
                f"FLEET_WORKER_ENDPOINTS / PADDLE_TRAINER_ENDPOINTS lists {len(workers)} workers, but "
                f"FLEET_NUM_WORKERS / PADDLE_TRAINERS_NUM says {num_workers}. Make them agree."
            )
        worker = self._number("FLEET_WORKER_INDEX", "PADDLE_TRAINER_ID") if role == WORKER else 0
        if worker >= num_workers:
            raise RoleError(
                f"FLEET_WORKER_INDEX / PADDLE_TRAINER_ID is {worker}, but there are {num_workers} workers, numbered "
                "from 0"
            )
        server = self._server_index(servers) if role == SERVER else 0
        asks = found.get("FLEET_RESTART") == ASK
        restart = self._number("FLEET_RESTART") if "FLEET_RESTART" in found and not asks else 0
        if role == SERVER:
            common |= self._replica(servers[server])
        common |= loss_of(found, num_workers)
        common["asks_restart"] = asks and role == WORKER
        return RoleInfo(role, worker, num_workers, server, servers, workers, restart=restart, **common)

    def _replica(self, places: str) -> dict[str, Any]:
        """Which replica of its shard a server is, and who decides which is primary."""
        num = len(places.split("|"))
        replica = self._number("FLEET_REPLICA") if self._environment.get("FLEET_REPLICA") else 0
        if replica >= num:
            raise RoleError(f"FLEET_REPLICA is {replica}, but this server has the addresses {places}: 0 is the first")
        coordinator = self._environment.get("FLEET_COORDINATOR")
        if num > 1 and not coordinator:
            raise RoleError(
                f"this server has replicas ({places}), but FLEET_COORDINATOR is missing, which decides which of them "
                "is primary: set it to etcd://host:port/NAME, or start with fleetrun --replicas 2"
            )
        return {"replica": replica, "coordinator": coordinator if num > 1 else None}

    def _collective(self, common: dict[str, Any]) -> RoleInfo:
        found = self._environment
        if found.get("FLEET_SERVER_ENDPOINTS") or found.get("PADDLE_PSERVERS_IP_PORT_LIST"):
            raise RoleError(
                "is_collective=True, but this process was started with servers (--server_num, --servers, or "
                "TRAINING_ROLE). Start it with `fleetrun --nproc_per_node N`, or leave is_collective out."
            )
        if not any(found.get(name) for name in ("RANK", "WORLD_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")):
            return RoleInfo(is_collective=True, local_size=1, **common)
        size = self._number("WORLD_SIZE", "PADDLE_TRAINERS_NUM", at_least=1)
        rank = self._number("RANK", "PADDLE_TRAINER_ID")
        if rank >= size:
            raise RoleError(f"RANK / PADDLE_TRAINER_ID is {rank}, but there are {size} ranks, numbered from 0")
        workers: tuple[str, ...] = ()
        if found.get("MASTER_ADDR") or size == 1:
            if found.get("MASTER_ADDR") and not found.get("MASTER_PORT"):
                raise RoleError("MASTER_ADDR is set, but MASTER_PORT is missing. Set it, or start with fleetrun.")
            master = ""  # torch reads these two itself
        else:
            workers = self._endpoints("PADDLE_TRAINER_ENDPOINTS")
            if len(workers) != size:
                raise RoleError(
                    f"PADDLE_TRAINER_ENDPOINTS lists {len(workers)} ranks, but WORLD_SIZE / PADDLE_TRAINERS_NUM says "
                    f"{size}. Make them agree."
                )
            master = workers[0]
        gpu = found.get("FLAGS_selected_gpus") or "0"
        if not (gpu.isascii() and gpu.isdigit()):
            raise RoleError(f"FLAGS_selected_gpus must be one number, that of this rank's GPU, found {gpu!r}")
        local = self._number("LOCAL_RANK") if found.get("LOCAL_RANK") else int(gpu)
        more: dict[str, Any] = {"is_collective": True, "local_rank": local, "master": master}
        more["local_size"] = self._local_size(workers[rank] if workers else "", workers)
        restart = self._number("TORCHELASTIC_RESTART_COUNT") if found.get("TORCHELASTIC_RESTART_COUNT") else 0
        return RoleInfo(WORKER, rank, size, worker_endpoints=workers, restart=restart, **more, **common)

    def _local_size(self, own: str, workers: Sequence[str]) -> int:
        """Ranks of this machine: as the launcher says, or as many as have its address; 0 if neither is there."""
        if self._environment.get("LOCAL_WORLD_SIZE"):
            return self._number("LOCAL_WORLD_SIZE", at_least=1)
        host = own.rpartition(":")[0]
        return sum(worker.rpartition(":")[0] == host for worker in workers)

    def _role(self) -> str | None:
        values = [value for name in ("FLEET_ROLE", "TRAINING_ROLE") if (value := self._environment.get(name))]
        if not values:
            return None
        value = values[0]
        known = {"WORKER": WORKER, "TRAINER": WORKER, "SERVER": SERVER, "PSERVER": SERVER}
        if value.upper() == "HETER_TRAINER":
            raise RoleError("TRAINING_ROLE=HETER_TRAINER: heter workers are not available yet")
        if value.upper() not in known:
            raise RoleError(f"FLEET_ROLE / TRAINING_ROLE is {value!r}; expected one of {', '.join(known)}")
        if len({known.get(value.upper(), value) for value in values}) > 1:
            raise RoleError(f"FLEET_ROLE is {values[0]!r} and TRAINING_ROLE is {values[1]!r}: set one of them")
        return known[value.upper()]

    def _refuse_fleet_without_role(self) -> None:
        """What speaks of other processes needs a role: to train alone then would be a silent mistake."""
        for name, missing, alone in (
            ("FLEET_SERVER_ENDPOINTS", "FLEET_ROLE", ""),
            ("PADDLE_PSERVERS_IP_PORT_LIST", "TRAINING_ROLE", ""),
            ("FLEET_NUM_WORKERS", "FLEET_ROLE", "1"),
            ("PADDLE_TRAINERS_NUM", "TRAINING_ROLE", "1"),
            ("FLEET_WORKER_INDEX", "FLEET_ROLE", "0"),
            ("PADDLE_TRAINER_ID", "TRAINING_ROLE", "0"),
            ("WORLD_SIZE", "FLEET_ROLE", "1"),  # a script for servers that was started by torchrun
        ):
            value = self._environment.get(name)
            if value and value != alone:
                raise RoleError(
                    f"{name}={value} is set, but {missing} is missing. Set it, or start with fleetrun; to train alone, "
                    f"remove {name}; for collective training call fleet.init(is_collective=True)."
                )

    def _get(self, *names: str) -> str:
        values = {name: value for name in names if (value := self._environment.get(name))}
        if len(set(values.values())) > 1:
            raise RoleError(
                " and ".join(f"{name}={value!r}" for name, value in values.items())
                + " say different things. Set one of them, or make them agree."
            )
        if values:
            return next(iter(values.values()))
        role = "FLEET_ROLE" if "FLEET_ROLE" in self._environment else "TRAINING_ROLE"
        if self._is_collective:
            known = ("WORLD_SIZE", "RANK", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID")
            role = next(name for name in known if self._environment.get(name))
        raise RoleError(
            f"{role} is set, but {' (or '.join(names)}{')' * (len(names) - 1)} is missing. Set it, or start "
            "with fleetrun."
        )

    def _endpoints(self, *names: str) -> tuple[str, ...]:
        return _endpoints(self._get(*names), " / ".join(names))

    def _number(self, *names: str, at_least: int = 0) -> int:
        value = self._get(*names)
        if not _NUMBER.fullmatch(value.removeprefix("-")) or int(value) < at_least:
            raise RoleError(f"{' / '.join(names)} must be a number of at least {at_least}, found {value!r}")
        return int(value)

    def _server_index(self, servers: Sequence[str]) -> int:
        if self._environment.get("FLEET_SERVER_INDEX"):
            index = self._number("FLEET_SERVER_INDEX")
            if index >= len(servers):
                raise RoleError(f"FLEET_SERVER_INDEX is {index}, but the list of servers has {len(servers)}")
            return index
        own = f"{self._get('POD_IP', 'FLEET_SERVER_INDEX')}:{self._get('PADDLE_PORT')}"
        if own not in servers:
            raise RoleError(
                f"this server is {own} by POD_IP and PADDLE_PORT, which is not in the list {', '.join(servers)}"
            )
        return servers.index(own)


def is_collective_job(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment is that of a rank: it has a number of ranks, and no role in a job with servers."""
    found = os.environ if environment is None else environment
    servers = ("FLEET_ROLE", "TRAINING_ROLE", "FLEET_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST")
    ranks = ("RANK", "WORLD_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    return not any(found.get(name) for name in servers) and any(found.get(name) for name in ranks)


class UserDefinedRoleMaker:
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
    ) -> None:
        if role not in (WORKER, SERVER):
            raise RoleError(f"role must be 'worker' or 'server', found {role!r}")
        if worker_num < 1:
            raise RoleError(f"worker_num must be at least 1, found {worker_num}")
        if worker_endpoints and len(worker_endpoints) != worker_num:
            raise RoleError(f"worker_endpoints lists {len(worker_endpoints)} workers, but worker_num is {worker_num}")
        limit = worker_num if role == WORKER else len(server_endpoints)
        if not 0 <= current_id < max(1, limit):
            raise RoleError(f"current_id is {current_id}, but there are {limit} {role}s, numbered from 0")
        if not server_endpoints and (role == SERVER or worker_num > 1):
            raise RoleError(f"server_endpoints is empty: a {role} of a fleet needs the addresses of all servers")
        self._info = RoleInfo(
            role,
            current_id if role == WORKER else 0,
            worker_num,
            current_id if role == SERVER else 0,
            _endpoints(",".join(server_endpoints), "server_endpoints"),
            _endpoints(",".join(worker_endpoints), "worker_endpoints"),
            key_dir,
            insecure,
        )

    def read(self) -> RoleInfo:
        key_dir = self._info.key_dir or os.environ.get("FLEET_KEY_DIR")
        loss = loss_of(os.environ, self._info.num_workers)
        return replace(self._info, key_dir=key_dir, **_process_settings(os.environ), **loss)


def _process_settings(found: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a process that come from the environment even if its role was set in code."""
    threads = found.get("CPU_NUM", "0")
    if not (threads.isascii() and threads.isdigit()):
        raise RoleError(f"CPU_NUM must be a number of threads, found {threads!r}")
    return {
        "socket_dir": found.get("FLEET_SOCKET_DIR"),
        "address_book": found.get("FLEET_ADDRESS_BOOK"),
        "status_file": found.get("FLEET_STATUS_FILE"),
        "save_on_stop": found.get("FLEET_SAVE_ON_STOP") or None,
        "debug": found.get("PSERVER_DEBUG", "0") not in ("", "0"),
        "verbose": any(found.get(name, "0") not in ("", "0") for name in ("FLEET_VERBOSE", "PSERVER_DEBUG")),
        "num_threads": int(threads),
        "start_timeout": start_timeout_of(found),
        "worker_timeout": _seconds(found, "FLEET_WORKER_TIMEOUT", RoleInfo.worker_timeout),
        "orphan_timeout": _seconds(found, "FLEET_ORPHAN_TIMEOUT", RoleInfo.orphan_timeout, or_never=True),
        **durability_of(found),
    }


def start_timeout_of(found: Mapping[str, str]) -> float:
    """Seconds that a process waits for others that give no sign, as the environment says it. Raises RoleError."""
    return _seconds(found, "FLEET_START_TIMEOUT", RoleInfo.start_timeout)


def loss_of(found: Mapping[str, str], num_workers: int) -> dict[str, Any]:
    """With how many workers a job begins, and what the loss of one means, as the environment says it. Raises
    RoleError."""
    least = found.get(MIN_WORKERS) or "0"
    if not _NUMBER.fullmatch(least) or int(least) > num_workers:
        raise RoleError(
            f"{MIN_WORKERS} is the number of workers with which an elastic job begins, at most FLEET_NUM_WORKERS "
            f"({num_workers}); found {least!r}"
        )
    rule = found.get(ON_LOSS) or (GO_ON if int(least) else LOSS_END)
    if rule not in LOSS_RULES:
        raise RoleError(f"{ON_LOSS} must be one of {', '.join(LOSS_RULES)}; found {rule!r}")
    if int(least) and rule != GO_ON:
        raise RoleError(
            f"{ON_LOSS}={rule} and {MIN_WORKERS}={least}: workers of an elastic job come and go, and nobody waits for "
            f"one that is gone. Leave out {ON_LOSS}, or {MIN_WORKERS}."
        )
    return {"min_workers": int(least), "on_worker_loss": rule}


def durability_of(found: Mapping[str, str]) -> dict[str, Any]:
    """How servers keep what they promise, as the environment says it. Raises RoleError."""
    kind = found.get(DURABILITY) or RoleInfo.durability
    if kind not in SETTINGS:
        raise RoleError(f"{DURABILITY} must be one of {', '.join(SETTINGS)}; found {kind!r}")
    text = found.get(FSYNC) or str(RoleInfo.fsync_ms)
    try:
        fsync_ms = float(text)
    except ValueError:
        fsync_ms = -1.0
    if not 0 <= fsync_ms <= MAX_FSYNC_MS:
        raise RoleError(f"{FSYNC} must be a number of milliseconds from 0 to {MAX_FSYNC_MS:g}, found {text!r}")
    store = found.get(LOG_STORE) or None
    return {"durability": kind, "log_store": store, "log_run": found.get(LOG_RUN) or "", "fsync_ms": fsync_ms}


def _seconds(found: Mapping[str, str], name: str, default: float, or_never: bool = False) -> float:
    """`or_never`: 0 is allowed, and stands for it."""
    text = found.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    is_never = or_never and text.strip() in ("0", "0.0")
    if not is_never and not 1.0 <= seconds <= MAX_SECONDS:  # NaN among them
        never = ", or 0 for never" if or_never else ""
        raise RoleError(f"{name} must be a number of seconds from 1 to {MAX_SECONDS:g}{never}, found {text!r}")
    return seconds


def _endpoints(text: str, source: str) -> tuple[str, ...]:
    """Addresses `host:port`, separated by commas. An error names `source`, the variable or argument they come from."""
    addresses = tuple(address.strip() for address in text.split(",") if address.strip())
    is_replicated = "server" in source.lower()  # | stands between the replicas of a server
    places = [place for address in addresses for place in (address.split("|") if is_replicated else [address])]
    for address in places:
        host, colon, port = address.rpartition(":")
        if not (host and colon and _NUMBER.fullmatch(port) and int(port) < 1 << 16):
            raise RoleError(f"{source}: an address must be host:port, found {address!r} in {text!r}")
    if len(set(places)) != len(places):
        raise RoleError(f"{source}: an address appears twice in {text!r}")
    return addresses
