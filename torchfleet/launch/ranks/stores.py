"""The stores of torch.distributed through which launchers and ranks exchange addresses: one process serves each."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchfleet.base.errors import RoleError
from torchfleet.ps.net.keys import is_private

PATIENCE = 900.0  # seconds that a machine waits for the others
_TIMEOUT = timedelta(seconds=60)  # of one operation of a store
_CONNECTION = timedelta(seconds=5)  # to a store that has just answered; torch tries for up to three times as long

Report = Callable[[str], None]  # shows a line to the user


class StoreAddress(NamedTuple):
    """Where a store listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        return is_private(f"tcp://{self}")


def serve(address: StoreAddress) -> TCPStore:
    """Return a store that listens at `address` (port 0: any free port). At a loopback address only this machine can
    reach it."""
    try:
        if not address.is_private:
            return TCPStore(address.host, address.port, None, True, _TIMEOUT, wait_for_workers=False)
        family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with socket.create_server(resolved, family=family) as listening:
            port = listening.getsockname()[1]
            return TCPStore(
                address.host, port, None, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
            )
    except (OSError, RuntimeError) as error:
        raise RoleError(
            f"cannot listen on {address}: {str(error).splitlines()[0]}. Give --master a free port."
        ) from None


def reach(address: StoreAddress, report: Report, patience: float = PATIENCE) -> TCPStore:
    """Return a client of the store that another launcher serves. Blocks until it has started. Raises
    RoleError after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    for attempt in itertools.count():
        try:
            socket.create_connection(address, timeout=2.0).close()
            store = TCPStore(address.host, address.port, None, False, _CONNECTION)
            store.set_timeout(_TIMEOUT)
            return store
        except (OSError, RuntimeError) as error:
            if attempt == 0:
                report(f"[fleetrun] {address} does not answer yet; waiting")
            if time.monotonic() > deadline:
                raise RoleError(
                    f"{address} has not answered for {patience:.0f} s ({error}): is machine 0 running?"
                ) from None
        time.sleep(0.2)
    raise AssertionError


def serve_or_reach(address: StoreAddress, report: Report) -> tuple[TCPStore, bool]:
    """Return the store, and whether this process serves it: the first launcher on the machine of `address` does."""
    with contextlib.suppress(RoleError):
        return serve(address), True
    return reach(address, report), False
