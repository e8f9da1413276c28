"""The environment that a new job has from the process that starts it.

The launcher may itself run as a process of a job, such as a worker that starts a job of its own to evaluate the model.
The new job must not inherit the role of that process, nor the outer job's logs, coordinator and rules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.json_lines import VARIABLE as LOG_FORMAT
from torchfleet.base.role.process_settings import (
    DURABILITY,
    FORK_SERVERS,
    FSYNC,
    LOG_RUN,
    LOG_STORE,
    MAX_RESTART,
    MIN_WORKERS,
    ON_LOSS,
    RUN_SCRIPT,
    WAIT_FOR_BACKUPS,
    process_settings,
)
from torchfleet.base.role.variables import is_on
from torchfleet.ps.coordination.coordinators import VARIABLE as COORDINATOR

# Of one process: never inherited.
ROLES = {
    "FLEET_ROLE", "FLEET_RESTART", MAX_RESTART, "FLEET_WORKER_INDEX", "FLEET_SERVER_INDEX",
    "FLEET_HETER_INDEX", "FLEET_HETER_ENDPOINTS", "PADDLE_HETER_TRAINER_IP_PORT_LIST",
    "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
    "FLEET_WORKER_ENDPOINTS", "FLEET_REPLICA", "FLEET_SOCKET_DIR", "FLEET_ADDRESS_BOOK", "TRAINING_ROLE", LOG_FORMAT,
    "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS",
}  # fmt: skip
# Of one run: a user may set them for fleetrun; those of an outer job belong to that job.
_OF_RUN = {
    DURABILITY, LOG_STORE, LOG_RUN, FSYNC, COORDINATOR, MIN_WORKERS, ON_LOSS, WAIT_FOR_BACKUPS, "FLEET_SAVE_ON_STOP",
    "FLEET_NUM_WORKERS", "FLEET_SERVER_ENDPOINTS", "FLEET_STATUS_FILE",
}  # fmt: skip
# Variables of a process that say what an option of fleetrun says, and which fleetrun itself does not read.
_SAID_BY_OPTIONS = {
    MAX_RESTART: "--max_restart", "FLEET_NUM_WORKERS": "--worker_num", "FLEET_SERVER_ENDPOINTS": "--servers",
    "FLEET_WORKER_ENDPOINTS": "--workers", "FLEET_HETER_ENDPOINTS": "--heter_workers",
}  # fmt: skip


def surroundings(found: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that a new job may read and that its processes inherit: those of this process, without its
    role, and without those of the job that it belongs to, if any."""
    found = os.environ if found is None else found
    left_out = ROLES | _OF_RUN if _is_in_job(found) else ROLES
    return {name: value for name, value in found.items() if name not in left_out}


def check_surroundings() -> None:
    """Raise RoleError for variables with invalid values, for misspelt ones, and for those that are ignored because an
    option says the same."""
    found = surroundings()
    process_settings(found)
    for name in (RUN_SCRIPT, FORK_SERVERS):
        is_on(found, name)
    if _is_in_job(os.environ):
        return
    for name, option in _SAID_BY_OPTIONS.items():
        if os.environ.get(name):
            raise RoleError(
                f"{name}={os.environ[name]} is set, and fleetrun sets it for its processes itself: say {option}, and "
                f"remove {name}"
            )


def _is_in_job(found: Mapping[str, str]) -> bool:
    return any(found.get(name) for name in ("FLEET_ROLE", "TRAINING_ROLE", "FLEET_STATUS_FILE"))
