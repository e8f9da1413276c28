"""This worker's membership: it joins the servers and sends heartbeats until it leaves or its process ends."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import NumberTaken, ServerRestarted, ServerUnreachable
from torchfleet.base.process_place import own_place
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.requests import Joined

_SIGNS = 5  # heartbeats per time-out
_MARGIN = 1.0  # seconds beyond a time-out, after which the servers have certainly given up an earlier process
_PAUSE = 0.2  # seconds before this worker asks again for a number that an earlier process holds
_FAREWELL = 1.0  # seconds that process exit may wait for servers that may be gone


class Membership:
    """Joins the job on construction, and sends heartbeats from its own thread.

    A process that ends without `close` tells the servers, so that workers waiting for it learn of it within seconds.
    """

    def __init__(
        self,
        client: Client,
        info: RoleInfo,
        sync_timeout: float,
        waiting: Callable[[], float | None],
        claims: Sequence[dict[str, Any]],
    ) -> None:
        """Takes ownership of `client`. `waiting`: the share of its time that this worker waits for servers; called from
        another thread. `claims`: by server, what this worker was told of the job. Raises RoleError if a server refuses
        this worker.

        If an earlier process with this worker's number was killed, waits until the servers have given it up.
        """
        self._client, self._timeout, self._waiting, self._claims = client, info.worker_timeout, waiting, claims
        self._body = {
            **own_place()._asdict(),
            "num_workers": info.num_workers,
            "timeout": info.worker_timeout,
            "sync_timeout": sync_timeout,
            "restart": info.restart,
            "max_restart": info.max_restart,
            "min_workers": info.min_workers,
            "on_worker_loss": info.on_worker_loss,
        }
        try:
            self.told = self._join()  # by server, what it tells about the job
        except BaseException:
            client.close()
            raise
        self._over = threading.Event()
        self._is_process_ending = False
        self._thread = BackgroundThreads([self._stay], "sending heartbeats to the servers failed", on_end=client.close)
        self._thread.start()
        atexit.register(self._end)

    @property
    def num_members(self) -> int:
        """Number of member workers in the servers' last reply."""
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
        """Raise the servers' error if they accepted another process as this worker."""
        self._thread.check()

    def finish(self, client: Client) -> None:
        """Tell the servers, by `client`, that this worker makes no more steps: no other worker waits for it anymore."""
        self._body = {**self._body, "finished": True}
        client.join({**self._body, "again": True})

    def close(self) -> None:
        """Stop the heartbeats. If it raises no error, this worker can leave now."""
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
        # The training thread detects by itself that a server is gone, and reports it.
        with contextlib.suppress(ServerUnreachable, ServerRestarted):
            body = {**self._body, "again": True, "ended": ended, "waiting": self._waiting()}
            self.told = self._client.join(body, timeout)
