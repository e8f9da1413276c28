"""Settings of a process from the environment, apart from its role: timeouts, server logs, lost workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchfleet.base.errors import RoleError
from torchfleet.base.role.named_variables import NUMBER
from torchfleet.base.role.role_info import GO_ON, LOSS_END, LOSS_RULES, SETTINGS, RoleInfo
from torchfleet.base.role.variables import is_on, refuse_misspelt

MAX_SECONDS = 7 * 24 * 3600.0
MAX_FSYNC_MS = 60_000.0
ON_LOSS, MIN_WORKERS, MAX_RESTART = "FLEET_ON_WORKER_LOSS", "FLEET_MIN_WORKERS", "FLEET_MAX_RESTART"
OF_JOB = "--of_job"  # option of `python -m torchfleet.server`: this process is the server of the environment's role
RUN_SCRIPT = "FLEET_SERVERS_RUN_SCRIPT"  # 1: servers run the script, whatever its source says
FORK_SERVERS = "FLEET_FORK_SERVERS"  # 0: fleetrun starts every server as an interpreter of its own
WAIT_FOR_BACKUPS = "FLEET_WAIT_FOR_BACKUPS"
DURABILITY, LOG_STORE, LOG_RUN, FSYNC = "FLEET_DURABILITY", "FLEET_LOG_STORE", "FLEET_LOG_RUN", "FLEET_FSYNC_MS"


def process_settings(found: Mapping[str, str]) -> dict[str, Any]:
    """Settings that come from the environment even if the role was set in code. Raises RoleError for invalid values,
    and for names that are almost those of settings."""
    refuse_misspelt(found)
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
        "max_restart": _restarts(found),
        "waits_for_backups": is_on(found, WAIT_FOR_BACKUPS, "1"),
        "start_timeout": start_timeout_of(found),
        "worker_timeout": worker_timeout_of(found),
        "orphan_timeout": _seconds(found, "FLEET_ORPHAN_TIMEOUT", RoleInfo.orphan_timeout, or_never=True),
        **durability_of(found),
    }


def start_timeout_of(found: Mapping[str, str]) -> float:
    """Seconds that a process waits for others that do not respond, from the environment. Raises RoleError."""
    return _seconds(found, "FLEET_START_TIMEOUT", RoleInfo.start_timeout)


def worker_timeout_of(found: Mapping[str, str]) -> float:
    """Seconds of silence after which a worker counts as lost, from the environment. Raises RoleError."""
    return _seconds(found, "FLEET_WORKER_TIMEOUT", RoleInfo.worker_timeout)


def loss_of(found: Mapping[str, str], num_workers: int) -> dict[str, Any]:
    """The number of workers with which a job begins and the rule for lost workers, from the environment. Raises
    RoleError.
    """
    least = found.get(MIN_WORKERS) or "0"
    if not NUMBER.fullmatch(least) or int(least) > num_workers:
        raise RoleError(
            f"{MIN_WORKERS} is the number of workers with which an elastic job begins, at most FLEET_NUM_WORKERS "
            f"({num_workers}); found {least!r}"
        )
    rule = found.get(ON_LOSS) or (GO_ON if int(least) else LOSS_END)
    if rule not in LOSS_RULES:
        raise RoleError(f"{ON_LOSS} must be one of {', '.join(LOSS_RULES)}; found {rule!r}")
    if int(least) and rule != GO_ON:
        raise RoleError(
            f"{ON_LOSS}={rule} and {MIN_WORKERS}={least}: workers of an elastic job come and go, and no worker waits "
            f"for one that has left. Leave out {ON_LOSS}, or {MIN_WORKERS}."
        )
    return {"min_workers": int(least), "on_worker_loss": rule}


def durability_of(found: Mapping[str, str]) -> dict[str, Any]:
    """The durability settings of servers, from the environment. Raises RoleError."""
    kind = found.get(DURABILITY) or RoleInfo.durability
    if kind not in SETTINGS:
        raise RoleError(f"{DURABILITY} must be one of {', '.join(SETTINGS)}; found {kind!r}")
    text = found.get(FSYNC) or str(RoleInfo.fsync_ms)
    try:
        fsync_ms = float(text)
    except ValueError:
        fsync_ms = -1.0
    if not 0 <= fsync_ms <= MAX_FSYNC_MS:
        raise RoleError(
            f"{FSYNC} (--fsync_ms) must be a number of milliseconds from 0 to {MAX_FSYNC_MS:g}, found {text!r}"
        )
    store = found.get(LOG_STORE) or None
    return {"durability": kind, "log_store": store, "log_run": found.get(LOG_RUN) or "", "fsync_ms": fsync_ms}


def log_folder(store: str, server: int, replica: int = 0) -> Path:
    """The folder of the log of one replica of a server, in `store`, the folder of all logs."""
    return Path(store) / (f"server-{server}.replica{replica}" if replica else f"server-{server}")


def _restarts(found: Mapping[str, str]) -> int:
    text = found.get(MAX_RESTART) or "0"
    if not NUMBER.fullmatch(text):
        raise RoleError(f"{MAX_RESTART} must be how often the launcher starts a worker again, found {text!r}")
    return int(text)


def _seconds(found: Mapping[str, str], name: str, default: float, or_never: bool = False) -> float:
    """`or_never`: 0 is allowed and means never."""
    text = found.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    is_never = or_never and text.strip() in ("0", "0.0")
    if not is_never and not 1.0 <= seconds <= MAX_SECONDS:  # also refuses NaN
        never = ", or 0 for never" if or_never else ""
        raise RoleError(f"{name} must be a number of seconds from 1 to {MAX_SECONDS:g}{never}, found {text!r}")
    return seconds
