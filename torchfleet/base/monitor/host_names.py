"""The names under which a client may address an HTTP port.

A page of another site that reaches the port by DNS rebinding sends the name of its own site.
"""

from __future__ import annotations

import functools
import ipaddress
import socket


class HostNames:
    """The names of this machine, for a listener on `host`."""

    def __init__(self, host: str, takes_any_beyond_loopback: bool = False) -> None:
        """`takes_any_beyond_loopback`: a listener that other machines reach takes every name. They may know it by one
        that this machine does not, such as that of a Kubernetes service.
        """
        self._takes_any = takes_any_beyond_loopback and not is_loopback(host)
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        if not is_loopback(host) and not self._takes_any:
            self._names.add(socket.getfqdn().lower())  # may wait for a name server
        self.is_known = functools.lru_cache(maxsize=256)(self._is_known)  # clients send the same one each time

    def _is_known(self, header: str) -> bool:
        """Whether a Host header names this machine. An IP address cannot be rebound and is accepted. The port is
        ignored, since it may be that of a tunnel.
        """
        name = _host_of(header)
        return self._takes_any or name in self._names or _is_address(name)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
