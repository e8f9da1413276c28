"""Tells servers that a worker is being started, so that they do not give it up before it has joined."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from torchfleet.base.errors import FleetError
from torchfleet.base.role.process_settings import start_timeout_of, worker_timeout_of
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.net.wire import Role

LEASES = 6  # time-outs of a worker for which servers wait after each message


class Starting:
    """Tells the servers which workers are being started, twice in every FLEET_WORKER_TIMEOUT, until these have joined
    or FLEET_START_TIMEOUT is over. It sends nothing about a worker that joins within its first time-out.

    A thread talks to the servers, which may be away or starting themselves. `look` does not block.
    """

    def __init__(
        self,
        way: Way,
        servers: Sequence[str],
        role: Role = Role.LAUNCHER,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`role`: of the sender. Raises RoleError if a time-out in the environment is not a number."""
        self._way, self._servers, self._role = way, servers, role
        self._lease, self._longest = worker_timeout_of(environment), start_timeout_of(environment)
        self._since: dict[tuple[int, int], float] = {}
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self, starting: Collection[tuple[int, int]]) -> None:
        """Call it again and again, with the workers that are being started now: index and number of restarts."""
        if not starting and not self._since:
            return
        now = time.monotonic()
        self._since = {process: self._since.get(process, now) for process in starting}
        if self._thread is None and self._due():
            self._thread = threading.Thread(target=self._run, name="starting workers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send nothing from now on. Does not wait for a message that is on its way."""
        self._is_over.set()

    def _due(self) -> list[int]:
        """Return the workers that servers are told of."""
        now, since = time.monotonic(), self._since
        return sorted(worker for (worker, _), begun in since.items() if self._lease <= now - begun < self._longest)

    def _run(self) -> None:
        while True:
            if due := self._due():
                with contextlib.suppress(FleetError):  # a server that does not answer is told again
                    self._tell(due)
            if self._is_over.wait(self._lease / 2):
                return

    def _tell(self, workers: Sequence[int]) -> None:
        # Imported here: a member of a cluster, which seldom sends anything, starts without numba.
        from torchfleet.ps.worker.client.client import Client
        from torchfleet.ps.worker.client.connection import Patience

        keys = KeyFolder(self._way.key_dir) if self._way.key_dir else None
        endpoints, patience = [self._way.endpoint(address) for address in self._servers], Patience(self._lease / 2, 1)
        with Client.connect(endpoints, keys, worker=workers[0], role=self._role, patience=patience) as client:
            client.tell_starting(workers, LEASES * self._lease)
