"""Who this process is. The only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchfleet.errors import RoleError

WORKER, SERVER = "worker", "server"


@dataclass(frozen=True)
class RoleInfo:
    """The answer: role, index, and where everybody is. Without servers: one local worker."""

    role: str = WORKER
    worker_index: int = 0
    num_workers: int = 1
    server_index: int = 0
    server_endpoints: tuple[str, ...] = ()
    worker_endpoints: tuple[str, ...] = ()
    key_dir: str | None = None
    insecure: bool = False
    status_file: str | None = None
    restart: int = 0
    debug: bool = False

    @property
    def is_local(self) -> bool:
        """One process, servers within."""
        return not self.server_endpoints

    @property
    def num_servers(self) -> int:
        return max(1, len(self.server_endpoints))


class PaddleCloudRoleMaker:
    """The role from the environment: FLEET_* variables, or Paddle's names as they are.

    FLEET_ROLE (WORKER | SERVER)            TRAINING_ROLE (TRAINER | PSERVER)
    FLEET_SERVER_ENDPOINTS                  PADDLE_PSERVERS_IP_PORT_LIST
    FLEET_NUM_WORKERS                       PADDLE_TRAINERS_NUM
    FLEET_WORKER_INDEX                      PADDLE_TRAINER_ID
    FLEET_SERVER_INDEX                      POD_IP and PADDLE_PORT, looked up in the list of servers
    FLEET_WORKER_ENDPOINTS                  PADDLE_TRAINER_ENDPOINTS
    """

    def __init__(self, is_collective: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment
        if is_collective:
            raise RoleError("collective training is not available yet; use parameter-server mode (is_collective=False)")

    def read(self) -> RoleInfo:
        found = self._environment
        common = {
            "key_dir": found.get("FLEET_KEY_DIR"),
            "insecure": found.get("FLEET_INSECURE", "0") == "1",
            "status_file": found.get("FLEET_STATUS_FILE"),
            "debug": found.get("PSERVER_DEBUG", "0") not in ("", "0"),
        }
        role = self._role()
        if role is None:
            return RoleInfo(**common)  # type: ignore[arg-type]
        servers = _endpoints(self._get("FLEET_SERVER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST"))
        num_workers = self._number("FLEET_NUM_WORKERS", "PADDLE_TRAINERS_NUM", at_least=1)
        workers = _endpoints(found.get("FLEET_WORKER_ENDPOINTS") or found.get("PADDLE_TRAINER_ENDPOINTS") or "")
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
        restart = self._number("FLEET_RESTART") if "FLEET_RESTART" in found else 0
        return RoleInfo(role, worker, num_workers, server, servers, workers, restart=restart, **common)  # type: ignore[arg-type]

    def _role(self) -> str | None:
        value = self._environment.get("FLEET_ROLE") or self._environment.get("TRAINING_ROLE")
        if value is None:
            return None
        known = {"WORKER": WORKER, "TRAINER": WORKER, "SERVER": SERVER, "PSERVER": SERVER}
        if value.upper() == "HETER_TRAINER":
            raise RoleError("TRAINING_ROLE=HETER_TRAINER: heter workers are not available yet")
        if value.upper() not in known:
            raise RoleError(f"FLEET_ROLE / TRAINING_ROLE is {value!r}; expected one of {', '.join(known)}")
        return known[value.upper()]

    def _get(self, *names: str) -> str:
        for name in names:
            if self._environment.get(name):
                return self._environment[name]
        role = "FLEET_ROLE" if "FLEET_ROLE" in self._environment else "TRAINING_ROLE"
        raise RoleError(
            f"{role} is set, but {' (or '.join(names)}{')' * (len(names) - 1)} is missing. Set it, or start "
            "with fleetrun."
        )

    def _number(self, *names: str, at_least: int = 0) -> int:
        value = self._get(*names)
        if not value.lstrip("-").isdigit() or int(value) < at_least:
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
            _endpoints(",".join(server_endpoints)),
            _endpoints(",".join(worker_endpoints)),
            key_dir,
            insecure,
        )

    def read(self) -> RoleInfo:
        return self._info


def _endpoints(text: str) -> tuple[str, ...]:
    """`host:port` parts; anything else is named."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    for part in parts:
        host, colon, port = part.rpartition(":")
        if not (host and colon and port.isdigit() and int(port) < 1 << 16):
            raise RoleError(f"an address must be host:port, found {part!r} in {text!r}")
    if len(set(parts)) != len(parts):
        raise RoleError(f"an address appears twice in {text!r}")
    return parts
