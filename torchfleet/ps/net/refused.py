"""Asks the kernel whether a process listens at an address of this machine."""

from __future__ import annotations

import ipaddress
import socket

_TIMEOUT = 0.05  # seconds; on one machine the kernel answers at once


def is_refused(endpoint: str) -> bool:
    """Whether no process listens at `endpoint` any more: its process has ended, or has closed its socket.

    Only for ipc:// and addresses of loopback, where this machine's kernel answers. Always False for others: there a
    network may refuse connections to a process that runs.
    """
    family, address = _address(endpoint)
    if address is None:
        return False
    with socket.socket(family) as probe:
        probe.settimeout(_TIMEOUT)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return True
        except OSError:  # it is there and busy, or it is just being started
            return False
    return False


def _address(endpoint: str) -> tuple[socket.AddressFamily, str | tuple[str, int] | None]:
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc":
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:  # a name, which may be that of another machine
        return socket.AF_INET, None
    family = socket.AF_INET if found.version == 4 else socket.AF_INET6
    return family, (str(found), int(port)) if scheme == "tcp" and found.is_loopback else None
