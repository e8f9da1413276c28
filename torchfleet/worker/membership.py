"""This worker as the servers know it: joined, with a sign of life now and then, until it leaves or its process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchfleet.background import BackgroundThreads
from torchfleet.errors import ServerRestarted, ServerUnreachable
from torchfleet.worker.client.client import Client

_SIGNS = 5  # signs of life in a time-out
_FAREWELL = 1.0  # seconds that the end of a process may wait for servers that are perhaps gone


class Membership:
    """Joins the job when it is made, and says now and then from a thread of its own that this worker is alive.

    A process that ends without `close` says so to the servers: those who wait for it learn it within seconds.
    """

    def __init__(
        self,
        client: Client,
        num_workers: int,
        restart: int,
        timeout: float,
        sync_timeout: float,
        waiting: Callable[[], float | None],
        claims: Sequence[dict[str, Any]],
    ) -> None:
        """Owns `client` from now on. `waiting`: for what share of its time this worker waits for servers; called from
        another thread. `claims`: what it was told of the job, by server. Raises RoleError if one refuses it."""
        self._client, self._timeout, self._waiting = client, timeout, waiting
        self._body = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "num_workers": num_workers,
            "timeout": timeout,
            "sync_timeout": sync_timeout,
            "restart": restart,
        }
        try:
            client.join(self._body, claims=claims)
        except BaseException:
            client.close()
            raise
        self._over = threading.Event()
        self._is_process_ending = False
        self._thread = BackgroundThreads([self._stay], "sign of life", on_end=client.close)
        self._thread.start()
        atexit.register(self._end)

    def check(self) -> None:
        """Raise what the servers said, if they took another process for this worker."""
        self._thread.check()

    def close(self) -> None:
        """No more signs of life. Without an error this worker can leave now."""
        atexit.unregister(self._end)
        self._over.set()
        self._thread.join()

    def _end(self) -> None:
        self._is_process_ending = True
        self._over.set()
        self._thread.join(2 * _FAREWELL + self._timeout)

    def _stay(self) -> None:
        while not self._over.wait(self._timeout / _SIGNS):
            self._tell(self._timeout / 2)
        if self._is_process_ending:
            self._tell(_FAREWELL, ended=True)

    def _tell(self, timeout: float, ended: bool = False) -> None:
        # The training thread finds out by itself that a server is gone, and says so.
        with contextlib.suppress(ServerUnreachable, ServerRestarted):
            self._client.join({**self._body, "again": True, "ended": ended, "waiting": self._waiting()}, timeout)
