"""Where the workers of a hybrid job are: one whose loop is over learns that others wait in a step for it.

Gradients are exchanged inside of backward passes. A worker that goes to a barrier, a gather or the end of its job
while another one computes a step would leave both waiting until `sync_timeout`. So a worker that is held up in a step
says so in the store, and one that has come to a meeting looks there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from torchfleet.background import BackgroundThreads
from torchfleet.errors import WorkerMissing

_PATIENCE = 5.0  # seconds in a step before a worker says that it waits
_LOOK = 1.0  # seconds between two looks at the others
_FAREWELL = 30.0  # seconds that worker 0 stays for workers that may be lost
_PAUSE = 0.01  # seconds between two looks whether all have come


class Attendance:
    """This worker's side. `store` is its own from now on; the keys in it are the job's."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float, is_one_lost: Callable[[], bool]) -> None:
        """`is_one_lost`: asks the servers whether a worker gives no sign of life."""
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._is_one_lost = is_one_lost
        self._lock = threading.Lock()  # a store is for one thread at a time
        self._num_steps = self._num_meetings = 0
        self._since: float | None = None  # when the step began that is being computed
        self._over = threading.Event()
        self._thread = BackgroundThreads([self._watch], "the attendance of workers")
        self._thread.start()

    def begin_step(self) -> None:
        """A backward pass has begun: from here on this worker may have to wait for others."""
        if self._since is None:
            self._since = time.monotonic()

    def end_step(self) -> None:
        self._since = None
        self._num_steps += 1

    def meet(self, what: str) -> None:
        """Wait for all workers to come to a meeting; `what` is its name in an error.

        Raises WorkerMissing if one waits in a step that this worker is not going to make. Returns also if a worker is
        lost: the servers, where the meeting goes on, know which.
        """
        self._num_meetings += 1
        keys = [f"meeting {self._num_meetings}, {worker}" for worker in range(self._size)]
        self._set(keys[self._rank], "")
        start = look = time.monotonic()
        while not self._has(keys):
            now = time.monotonic()
            if now - look >= _LOOK:
                look = now
                self._raise_if_awaited(what)
                if self._is_one_lost() or now - start > self._timeout:
                    return
            time.sleep(_PAUSE)

    def close(self) -> None:
        """After the last meeting. Worker 0, whose process serves the store, stays until the others need it no more."""
        self._over.set()
        self._thread.join()
        keys = [f"left {worker}" for worker in range(1, self._size)]
        if self._rank:
            self._set(keys[self._rank - 1], "")
            return
        deadline = time.monotonic() + _FAREWELL
        while not self._has(keys) and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    def _raise_if_awaited(self, what: str) -> None:
        for worker in range(self._size):
            key = f"waiting {worker}"
            number = int(self._get(key)) if worker != self._rank and self._has([key]) else 0
            if number > self._num_steps:
                raise WorkerMissing(
                    f"worker {worker} waits in step {number}, and worker {self._rank} is in {what} after "
                    f"{self._num_steps} steps: in hybrid mode all workers make the same number of steps. Loop over "
                    "fleet.prefetch(loader), or use fleet.train_from_dataset: they end on all workers together."
                )

    def _watch(self) -> None:
        told = 0  # the step in which this worker has said that it waits
        while not self._over.wait(_LOOK):
            since, number = self._since, self._num_steps + 1
            if since is not None and time.monotonic() - since > _PATIENCE and told != number:
                told = number
                self._set(f"waiting {self._rank}", str(number))

    def _set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def _has(self, keys: list[str]) -> bool:
        with self._lock:
            return bool(self._store.check(keys))

    def _get(self, key: str) -> str:
        with self._lock:
            return bytes(self._store.get(key)).decode()
