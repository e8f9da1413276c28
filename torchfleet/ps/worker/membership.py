"""This worker as the servers know it: joined, with a sign of life now and then, until it leaves or its process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import NumberTaken, ServerRestarted, ServerUnreachable
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.requests import Joined

_SIGNS = 5  # signs of life in a time-out
_MARGIN = 1.0  # seconds beyond a time-out, after which one of before was surely given up
_PAUSE = 0.2  # seconds before this worker asks again for a number that one of before has
_FAREWELL = 1.0  # seconds that the end of a process may wait for servers that are perhaps gone


class Membership:
    """Joins the job when it is made, and says now and then from a thread of its own that this worker is alive.

    A process that ends without `close` says so to the servers: those who wait for it learn it within seconds.
    """

    def __init__(
        self,
        client: Client,
        info: RoleInfo,
        sync_timeout: float,
        waiting: Callable[[], float | None],
        claims: Sequence[dict[str, Any]],
    ) -> None:
        """Owns `client` from now on. `waiting`: for what share of its time this worker waits for servers; called from
        another thread. `claims`: what it was told of the job, by server. Raises RoleError if one refuses this worker.

        If a process of before has its number, and was killed, it waits until the servers have given that one up.
        """
        self._client, self._timeout, self._waiting, self._claims = client, info.worker_timeout, waiting, claims
        self._body = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "num_workers": info.num_workers,
            "timeout": info.worker_timeout,
            "sync_timeout": sync_timeout,
            "restart": info.restart,
            "min_workers": info.min_workers,
            "on_worker_loss": info.on_worker_loss,
        }
        try:
            self.told = self._join()  # by server, what it says of the job
        except BaseException:
            client.close()
            raise
        self._over = threading.Event()
        self._is_process_ending = False
        self._thread = BackgroundThreads([self._stay], "sign of life", on_end=client.close)
        self._thread.start()
        atexit.register(self._end)

    @property
    def num_members(self) -> int:
        """Workers that are there, as the servers said last."""
        return max(joined.num_members for joined in self.told)

    def _join(self) -> list[Joined]:
        deadline = time.monotonic() + self._timeout + _MARGIN
        while True:
            try:
                return self._client.join(self._body, claims=self._claims)
            except NumberTaken:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE)

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
            body = {**self._body, "again": True, "ended": ended, "waiting": self._waiting()}
            self.told = self._client.join(body, timeout)
