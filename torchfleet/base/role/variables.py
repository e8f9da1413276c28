"""The variables of the environment that torchfleet reads: all that begin with FLEET_."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from torchfleet.base.errors import RoleError

_PREFIX = "FLEET_"
_LIKE = 0.85  # of difflib: one or two letters of a name are wrong, missing, or in another order
NAMES = frozenset({
    "FLEET_ADDRESS_BOOK", "FLEET_COORDINATOR", "FLEET_DEVICE", "FLEET_DIST_BACKEND", "FLEET_DURABILITY",
    "FLEET_ETCD_CA", "FLEET_ETCD_CERT", "FLEET_ETCD_KEY", "FLEET_ETCD_PASSWORD_FILE", "FLEET_ETCD_USER",
    "FLEET_FORK_SERVERS", "FLEET_FSYNC_MS", "FLEET_GRACE", "FLEET_GROUP", "FLEET_HEALTH_PORT",
    "FLEET_HETER_ENDPOINTS", "FLEET_HETER_INDEX", "FLEET_INDEX", "FLEET_INSECURE", "FLEET_KEY_DIR", "FLEET_LOG_FILE",
    "FLEET_LOG_FORMAT", "FLEET_LOG_RUN", "FLEET_LOG_STORE", "FLEET_MAX_NEW_ROWS", "FLEET_MAX_RESTART",
    "FLEET_MAX_TABLE_BYTES", "FLEET_MEMORY_FILES", "FLEET_METRICS_HOST", "FLEET_METRICS_PORT", "FLEET_MIN_WORKERS",
    "FLEET_NUM_WORKERS", "FLEET_ON_BAD_LINE", "FLEET_ON_WORKER_LOSS", "FLEET_ORPHAN_TIMEOUT", "FLEET_PIPE_OWNER",
    "FLEET_PROFILE", "FLEET_RAY_FUNCTION", "FLEET_REPLICA", "FLEET_REPLICAS", "FLEET_RESTART", "FLEET_ROLE",
    "FLEET_SAVE_ON_STOP", "FLEET_SAVE_ROOTS", "FLEET_SERVERS_RUN_SCRIPT", "FLEET_SERVER_ENDPOINTS",
    "FLEET_SERVER_INDEX", "FLEET_SOCKET_DIR", "FLEET_START_TIMEOUT", "FLEET_STATUS_FILE", "FLEET_TABLE_MEMORY",
    "FLEET_TABLE_PATH", "FLEET_TRACE_EVERY", "FLEET_VERBOSE", "FLEET_WAIT_FOR_BACKUPS", "FLEET_WORKER_ENDPOINTS",
    "FLEET_WORKER_INDEX", "FLEET_WORKER_TIMEOUT",
})  # fmt: skip


def refuse_misspelt(found: Mapping[str, str]) -> None:
    """Raise RoleError for a variable that has no effect, and whose name is almost that of one that has.

    Other names that begin with FLEET_ may belong to the user.
    """
    for name in sorted(found):
        if not name.startswith(_PREFIX) or name in NAMES:
            continue
        known = {each.removeprefix(_PREFIX): each for each in sorted(NAMES)}
        near = get_close_matches(name.removeprefix(_PREFIX), known, n=1, cutoff=_LIKE)
        if near:
            raise RoleError(
                f"{name} is set, and torchfleet reads no such variable. Did you mean {known[near[0]]}? Give a "
                "variable of your own a name that is less like it."
            )


def is_on(found: Mapping[str, str], name: str, default: str = "0") -> bool:
    """Whether a variable that is a switch is 1. Raises RoleError unless it is 1, 0, or not set."""
    text = found.get(name) or default
    if text not in ("0", "1"):
        raise RoleError(f"{name} must be 1 or 0, found {text!r}")
    return text == "1"
