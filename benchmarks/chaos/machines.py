"""Machines of a network of our own: namespaces on a bridge, each with a cable that can be pulled, or made deaf one way.

Nothing else can reach them, and they reach nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

from benchmarks.links import LinkError

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_BRIDGE = "bridge"
_CABLE = "cable"  # the end of a cable on its machine; machines do not see each other's


class Machines:
    """`addresses[i]`: of machine i."""

    def __init__(self, num: int) -> None:
        name = f"{os.getpid():x}{secrets.token_hex(2)}"
        self._hub = f"fleet-{name}-hub"
        self.namespaces = [f"fleet-{name}-{i}" for i in range(num)]
        self.addresses = [f"10.199.7.{i + 1}" for i in range(num)]

    def inside(self, machine: int, *command: str) -> list[str]:
        """The command that runs `command` on this machine."""
        return ["ip", "netns", "exec", self.namespaces[machine], *command]

    def pull_cable(self, machine: int) -> None:
        _call(["ip", "-n", self.namespaces[machine], "link", "set", _CABLE, "down"])

    def plug_in(self, machine: int) -> None:
        _call(["ip", "-n", self.namespaces[machine], "link", "set", _CABLE, "up"])

    def mute(self, machine: int) -> None:
        """Everything that it sends is lost; what is sent to it arrives. A token bucket drops what is larger than it."""
        bucket = ["tbf", "rate", "1kbit", "burst", "1", "limit", "1"]
        _call(["tc", "-n", self.namespaces[machine], "qdisc", "replace", "dev", _CABLE, "root", *bucket])

    def unmute(self, machine: int) -> None:
        _call(["tc", "-n", self.namespaces[machine], "qdisc", "del", "dev", _CABLE, "root"])

    def enter(self, machine: int) -> None:
        """Let the calling thread, and no other, talk as this machine."""
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespaces[machine]}", "rb") as opened:
            if library.setns(opened.fileno(), _NEW_NETWORK):
                raise LinkError(f"cannot enter {self.namespaces[machine]}: {os.strerror(ctypes.get_errno())}")

    def set_up(self) -> None:
        _call(["ip", "netns", "add", self._hub])
        _call(["ip", "-n", self._hub, "link", "add", _BRIDGE, "type", "bridge"])
        _call(["ip", "-n", self._hub, "link", "set", _BRIDGE, "up"])
        for i, namespace in enumerate(self.namespaces):
            _call(["ip", "netns", "add", namespace])
            ends = [f"port{i}", "type", "veth", "peer", "name", _CABLE, "netns", namespace]
            _call(["ip", "-n", self._hub, "link", "add", *ends])
            _call(["ip", "-n", self._hub, "link", "set", f"port{i}", "master", _BRIDGE, "up"])
            _call(["ip", "-n", namespace, "address", "add", f"{self.addresses[i]}/24", "dev", _CABLE])
            for device in ("lo", _CABLE):
                _call(["ip", "-n", namespace, "link", "set", device, "up"])

    def take_down(self) -> None:
        for namespace in (*self.namespaces, self._hub):  # cables and bridge go with them
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def machines(num: int) -> Iterator[Machines]:
    """Taken down again however the block ends. Raises LinkError where namespaces cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root, or a container with CAP_NET_ADMIN and CAP_SYS_ADMIN")
    made = Machines(num)
    try:
        made.set_up()
        yield made
    finally:
        made.take_down()


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
