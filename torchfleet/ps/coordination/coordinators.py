"""Coordinators by URL: file:///folder, etcd://host:port,host:port/name, etcds:// for TLS.

To add a coordinator, add a line to `_KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torchfleet.base.errors import RoleError
from torchfleet.ps.coordination.etcd_coordinator import EtcdCoordinator
from torchfleet.ps.coordination.etcd_gateway import Access, EtcdGateway, plain_access, secure_access
from torchfleet.ps.coordination.file_coordinator import FileCoordinator
from torchfleet.ps.coordination.view import Coordinator

VARIABLE = "FLEET_COORDINATOR"
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/,\[\]]+):[0-9]{1,5}")
_MOST_PORTS = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}(/[0-9]{1,9})?")


def make_coordinator(url: str) -> Coordinator:
    """The coordinator of a URL. Raises RoleError for an unknown or malformed URL, and the coordinator's own errors."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _KINDS:
        raise RoleError(
            f"{VARIABLE}, --coordinator: expected etcd://host:port/NAME, NAME being that of this run; found {url!r}"
        )
    return _KINDS[scheme](rest)


def _etcd(rest: str, access: Callable[[], Access] = plain_access) -> Coordinator:
    places, _, name = rest.partition("/")
    listed = places.split(",")
    if not all(_is_place(place) for place in listed) or not _NAME.fullmatch(name):
        raise RoleError(
            f"--coordinator: expected etcd://host:port/NAME, or several host:port separated by commas; found "
            f"etcd://{rest}. NAME is that of this run: letters, digits, '_', '.' and '-'."
        )
    return EtcdCoordinator(EtcdGateway(listed, access()), name)


def _is_place(text: str) -> bool:
    return bool(_PLACE.fullmatch(text)) and 0 < int(text.rpartition(":")[2]) < _MOST_PORTS


_KINDS: dict[str, Callable[[str], Coordinator]] = {
    "file": FileCoordinator,
    "etcd": _etcd,
    "etcds": lambda rest: _etcd(rest, secure_access),
}
