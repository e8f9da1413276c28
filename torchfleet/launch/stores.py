"""Stores of torch.distributed, in which launchers and ranks find each other: one process keeps one, others reach it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchfleet.errors import RoleError
from torchfleet.net.keys import is_private

PATIENCE = 900.0  # seconds to wait for other machines
_ANSWER = timedelta(seconds=60)  # a store that takes longer than this is not there

Say = Callable[[str], None]


class Place(NamedTuple):
    """Where a store listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_private(self) -> bool:
        return is_private(f"tcp://{self}")


def serve(place: Place) -> TCPStore:
    """A store that listens there (port 0: any), on loopback to this machine only."""
    try:
        if not place.is_private:
            return TCPStore(place.host, place.port, None, True, _ANSWER, wait_for_workers=False)
        family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address, family=family) as listening:
            port = listening.getsockname()[1]
            return TCPStore(
                place.host, port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listening.detach()
            )
    except (OSError, RuntimeError) as error:
        raise RoleError(f"cannot listen on {place}: {str(error).splitlines()[0]}. Give --master a free port.") from None


def reach(place: Place, say: Say) -> TCPStore:
    """The store that another launcher keeps, or will soon."""
    deadline = time.monotonic() + PATIENCE
    for attempt in itertools.count():
        try:
            socket.create_connection(place, timeout=2.0).close()
            return TCPStore(place.host, place.port, None, False, _ANSWER)
        except (OSError, RuntimeError) as error:
            if attempt == 0:
                say(f"[fleetrun] nobody answers at {place} yet; waiting")
            if time.monotonic() > deadline:
                raise RoleError(
                    f"nobody answers at {place} after {PATIENCE:.0f} s ({error}): is machine 0 running?"
                ) from None
        time.sleep(0.2)
    raise AssertionError


def serve_or_reach(place: Place, say: Say) -> tuple[TCPStore, bool]:
    """The store, and whether it is ours: the first launcher of the machine that it is on keeps it."""
    with contextlib.suppress(RoleError):
        return serve(place), True
    return reach(place, say), False
