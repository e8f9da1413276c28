"""Two network namespaces joined by a pair of virtual cables whose rate is held by the kernel (tc, token bucket)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_WORKER = Path(__file__).with_name("slow_links_worker.py")
_PORT = 29_400


class LinkError(Exception):
    """Namespaces cannot be made here, or a link does not do what it should."""


class Link:
    """The two ends: `namespaces[i]`, in which `devices[i]` has the address `addresses[i]`."""

    def __init__(self) -> None:
        name = f"{os.getpid():x}{secrets.token_hex(2)}"  # a device's name has at most 15 letters
        self.namespaces = [f"fleet-{name}-{end}" for end in range(2)]
        self.devices = [f"fl{name}{end}" for end in range(2)]
        self.addresses = ["10.199.0.1", "10.199.0.2"]  # within namespaces of their own: no other host has them

    def inside(self, end: int, *command: str) -> list[str]:
        """The command that runs `command` at this end."""
        return ["ip", "netns", "exec", self.namespaces[end], *command]

    def limit(self, mbit: float) -> None:
        """Limit both directions to this rate in Mbit/s; 0: no limit."""
        for end, device in enumerate(self.devices):
            if not mbit:
                # tc calls it an error to delete a limit that does not exist.
                subprocess.run(
                    self.inside(end, "tc", "qdisc", "del", "dev", device, "root"), capture_output=True, check=False
                )
                continue
            burst = max(1 << 16, int(mbit * 1e6 / 8 * 0.002))  # 2 ms worth: little against any exchange
            bucket = ["tbf", "rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "50ms"]
            _call(self.inside(end, "tc", "qdisc", "replace", "dev", device, "root", *bucket))

    def measure(self, seconds: float = 1.0) -> float:
        """Mbit/s that go through, from the second end to the first, over one TCP connection."""
        flags = ["--address", self.addresses[0], "--port", str(_PORT), "--seconds", str(seconds)]
        commands = [
            self.inside(end, sys.executable, str(_WORKER), what, *flags) for end, what in enumerate(("receive", "send"))
        ]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            outputs = [process.communicate(timeout=seconds + 150)[0] for process in both]
        finally:
            for process in both:
                process.kill()
        if any(process.returncode for process in both):
            raise LinkError("nothing goes through the link")
        return float(outputs[0])


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """A link of this process alone, taken down again however the block ends."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise LinkError(
            "network namespaces need root: run it with sudo, or in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN"
        )
    made = Link()
    try:
        _set_up(made)
        yield made
    finally:
        for namespace in made.namespaces:  # the devices go with them
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", made.devices[0]], capture_output=True, check=False)


def _set_up(made: Link) -> None:
    for namespace in made.namespaces:
        _call(["ip", "netns", "add", namespace])
    first, second = made.devices
    _call(["ip", "link", "add", first, "type", "veth", "peer", "name", second])
    for end, device in enumerate(made.devices):
        _call(["ip", "link", "set", device, "netns", made.namespaces[end]])
        _call(made.inside(end, "ip", "address", "add", f"{made.addresses[end]}/30", "dev", device))
        for name in ("lo", device):
            _call(made.inside(end, "ip", "link", "set", name, "up"))


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
