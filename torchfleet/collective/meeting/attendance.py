"""Attendance of ranks: a rank whose loop is over learns that other ranks wait for it in a step.

Gradients are exchanged inside backward passes. If a rank goes to a barrier, a gather, a save or the end of its job
while another one computes a step, both would wait until `sync_timeout`. So a rank that is held up in a step says so in
the store, and a rank that has come to a meeting checks the store. A step costs two readings of the clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import WorkerMissing
from torchfleet.collective.meeting.gpu_progress import GpuProgress

_PATIENCE = 3.0  # seconds in a step before a rank reports that it waits
_LOOK = 1.0  # seconds between two checks of the other ranks
_SILENCE = 20.0  # seconds without a heartbeat after which a rank counts as lost
_FAREWELL = 30.0  # seconds that rank 0 waits for ranks that may be lost
_PAUSE = 0.01  # at most, seconds between two checks whether all ranks have come
_HOST = torch.device("cpu")


class Attendance:
    """This rank's attendance. It owns `store` from now on; the ranks of the job share its keys."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        is_one_lost: Callable[[], bool] | None = None,
        noun: str = "rank",
    ) -> None:
        """`is_one_lost`: whether a rank has stopped sending heartbeats; None: ranks send them through the store."""
        self._store, self._rank, self._size, self._timeout, self._noun = store, rank, size, timeout, noun
        self._is_one_lost = is_one_lost or self._is_one_silent
        self._gives_signs = is_one_lost is None
        self._sign: str | None = None  # the last heartbeat of the next rank
        self._heard = 0.0  # when this heartbeat last changed
        self._lock = threading.Lock()  # only one thread at a time may use the store
        self._num_steps = self._num_meetings = 0
        self._since: float | None = None  # when the present step began
        self._progress: GpuProgress | None = None  # of the GPU, which the host runs ahead of
        self._ended = 0.0
        self._over = threading.Event()
        self._thread = BackgroundThreads([self._watch], "the attendance of ranks")
        self._thread.start()

    def begin_step(self) -> None:
        """Note that a step has begun: from here on this rank may wait for others."""
        if self._since is None:
            self._since = time.monotonic()

    def end_step(self, device: torch.device = _HOST) -> None:
        """Note that a step was issued to a device."""
        if device.type == "cuda":
            self._ended = time.monotonic()
            self._progress = self._progress or GpuProgress(device)
            self._progress.note()
        self._since = None
        self._num_steps += 1

    def meet(self, what: str) -> None:
        """Wait until all ranks come to a meeting; `what` is its name in an error.

        Raises WorkerMissing if another rank waits in a step that this rank is not going to make. Also returns if a rank
        or the store is lost: the operation that follows the meeting then fails.
        """
        with contextlib.suppress(dist.DistError):
            self._meet(what)

    def _meet(self, what: str) -> None:
        self._num_meetings += 1
        come, opened = f"meeting {self._num_meetings}", f"meeting {self._num_meetings} is on"
        if self._add(come) == self._size:
            self._set(opened, "")
        start = look = time.monotonic()
        pause = _PAUSE / 64
        while not self._has([opened]):
            now = time.monotonic()
            if now - look >= _LOOK:
                look = now
                self._raise_if_awaited(what)
                if self._is_one_lost() or now - start > self._timeout:
                    self._set(opened, "")  # opens it for all ranks: the others know no more than this one
            time.sleep(pause)
            pause = min(_PAUSE, 2 * pause)

    def close(self, alone: bool = False) -> None:
        """Leave after the last meeting. Rank 0, whose process may serve the store, waits until the others no longer
        need it.

        `alone`: wait for no other rank.
        """
        self._over.set()
        self._thread.join()
        if alone:
            return
        with contextlib.suppress(dist.DistError):
            self._take_leave()

    def _take_leave(self) -> None:
        keys = [f"left {rank}" for rank in range(1, self._size)]
        if self._rank:
            self._set(keys[self._rank - 1], "")
            return
        deadline = time.monotonic() + _FAREWELL
        while not self._has(keys) and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    @property
    def _num_begun(self) -> int:
        return self._num_steps + (self._since is not None)

    def _raise_if_awaited(self, what: str) -> None:
        for rank in range(self._size if self._has(["waiting"]) else 0):
            key = f"waiting {rank}"
            number = int(self._get(key)) if rank != self._rank and self._has([key]) else 0
            if number > self._num_begun:
                raise WorkerMissing(
                    f"{self._noun} {rank} waits in step {number}, and {self._noun} {self._rank} is in {what} after "
                    f"{self._num_steps} steps: all {self._noun}s must make the same number of steps. Loop over "
                    f"fleet.prefetch(loader), which ends on all {self._noun}s together, or give all of them equally "
                    "many batches."
                )

    def _watch(self) -> None:
        told = num_looks = 0  # told: the last step that this rank has reported waiting in
        while not self._over.wait(_LOOK):
            number = self._held_up_in()
            if number > told:
                told = number
                self._set(f"waiting {self._rank}", str(number))
                self._set("waiting", "")  # one key to check for other ranks as long as no rank waits
            num_looks += 1
            if self._gives_signs and num_looks % 5 == 1:
                self._set(f"sign {self._rank}", str(num_looks))

    def _held_up_in(self) -> int:
        """The step in which this rank has been held up for longer than _PATIENCE; 0 if none."""
        num_steps = self._num_steps  # read first: a step that ends meanwhile must not count as begun
        since, progress, now = self._since, self._progress, time.monotonic()
        if since is not None and now - since > _PATIENCE:
            return num_steps + 1
        is_computing = progress is not None and now - self._ended > _PATIENCE and progress.is_computing
        return num_steps if is_computing else 0

    def _is_one_silent(self) -> bool:
        """Whether the next rank has stopped sending heartbeats: every rank watches one other."""
        key, now = f"sign {(self._rank + 1) % self._size}", time.monotonic()
        sign = self._get(key) if self._has([key]) else ""
        if self._sign != sign:
            self._sign, self._heard = sign, now
        return now - self._heard > _SILENCE

    def _add(self, key: str) -> int:
        with self._lock:
            return int(self._store.add(key, 1))

    def _set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def _has(self, keys: list[str]) -> bool:
        with self._lock:
            return bool(self._store.check(keys))

    def _get(self, key: str) -> str:
        with self._lock:
            return bytes(self._store.get(key)).decode()
