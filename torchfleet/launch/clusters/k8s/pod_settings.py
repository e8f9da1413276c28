"""Options of pods, from text: variables, volumes, tolerations, labels, quantities. Errors name the option."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from torchfleet.base.errors import RoleError
from torchfleet.base.role.variables import refuse_misspelt
from torchfleet.launch.clusters.k8s.k8s_job import CACHE, KEYS, LOGS, SCRIPT, TMP, WORK, Claim
from torchfleet.launch.clusters.secret_signs import variable_sign

# The manifests set these. A second value would be ignored, or would change the role of a pod.
RESERVED = (
    "FLEET_INDEX", "FLEET_GROUP", "FLEET_SERVER_ENDPOINTS", "FLEET_NUM_WORKERS", "FLEET_HEALTH_PORT", "FLEET_GRACE",
    "FLEET_SAVE_ON_STOP", "FLEET_KEY_DIR", "FLEET_INSECURE", "FLEET_DURABILITY", "FLEET_LOG_STORE", "FLEET_LOG_RUN",
    "FLEET_FSYNC_MS", "FLEET_COORDINATOR", "FLEET_REPLICA", "FLEET_ROLE", "FLEET_RESTART", "FLEET_WORKER_INDEX",
    "FLEET_SERVER_INDEX", "FLEET_MIN_WORKERS", "FLEET_MAX_RESTART", "FLEET_WAIT_FOR_BACKUPS",
    "FLEET_SERVERS_RUN_SCRIPT", "FLEET_STATUS_FILE", "FLEET_SOCKET_DIR", "FLEET_ADDRESS_BOOK",
    "FLEET_WORKER_ENDPOINTS", "JOB_COMPLETION_INDEX",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_TAKEN = (KEYS, SCRIPT, WORK, TMP, CACHE, LOGS, "/dev/shm")


EXPORTS = ("FLEET_METRICS_PORT", "FLEET_METRICS_HOST", "FLEET_LOG_FORMAT")  # options of jobs, not of model servers


def variables(texts: Sequence[str], reserved: Sequence[str] = RESERVED) -> tuple[tuple[str, str], ...]:
    """Parse --env NAME=VALUE. The last value of a name wins."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not _NAME.fullmatch(name):
            raise RoleError(f"--env: expected NAME=VALUE, NAME of letters, digits and _; found {text!r}")
        if name in reserved:
            raise RoleError(
                f"--env {name}: the manifests set it themselves; leave it out. `fleetrun k8s --help` has an option for "
                "what users decide"
            )
        sign = variable_sign(name, value)
        if sign is not None:
            raise RoleError(
                f"--env {name}: found {sign}. Every user who can read the namespace can read "
                "the variables of a pod: put it into a Secret, and give --env_secret"
            )
        found[name] = value
    refuse_misspelt(found)
    return tuple(found.items())


def pairs(option: str, texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse LABEL=VALUE. Each label may occur once."""
    found: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or key in found:
            raise RoleError(f"{option}: expected LABEL=VALUE, each label once, as labels of nodes are; found {text!r}")
        found[key] = value
    return tuple(found.items())


def claims(texts: Sequence[str]) -> tuple[Claim, ...]:
    """Parse all --pvc options. Each path may occur once."""
    found = tuple(_claim(text) for text in texts)
    paths = [each.path for each in found]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise RoleError(f"--pvc: two claims for {twice}: choose another path for one")
    return found


def _claim(text: str) -> Claim:
    """Parse --pvc CLAIM=/PATH, or CLAIM=/PATH:ro."""
    name, separator, path = text.partition("=")
    is_read_only = path.endswith(":ro")
    path = path.removesuffix(":ro")
    is_path = posixpath.isabs(path) and ":" not in path and posixpath.normpath(path) == path and path != "/"
    if not separator or not _OBJECT.fullmatch(name) or not is_path:
        raise RoleError(f"--pvc: expected CLAIM=/PATH or CLAIM=/PATH:ro, such as data=/data; found {text!r}")
    taken = next((own for own in _TAKEN if path == own or path.startswith(f"{own}/")), None)
    if taken:
        raise RoleError(f"--pvc {text}: pods have {taken} for themselves; choose another path")
    return Claim(name, path, is_read_only)


def toleration(text: str) -> dict[str, str]:
    """Parse --toleration KEY or KEY=VALUE, followed by :EFFECT or nothing for all effects."""
    rest, _, effect = text.partition(":")
    key, separator, value = rest.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (":" in text and effect not in _EFFECTS):
        raise RoleError(f"--toleration: expected KEY[=VALUE][:EFFECT], EFFECT of {', '.join(_EFFECTS)}; found {text!r}")
    matched = {"key": key, "operator": "Equal", "value": value} if separator else {"key": key, "operator": "Exists"}
    return {**matched, "effect": effect} if effect else matched


def object_name(option: str, text: str) -> str:
    """Check the name of an object of the cluster, such as a Secret."""
    if not _OBJECT.fullmatch(text) or len(text) > 253:
        raise RoleError(f"{option}: expected the name of an object: small letters, digits, - and .; found {text!r}")
    return text


def quantity(option: str, text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise RoleError(f"{option}: expected a size as Kubernetes writes it, such as 10Gi; found {text!r}")
    return text
