"""Rows on their way from a cache back to the servers: a thread with its own client sends them, while others arrive."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future

_LOOK = 0.1  # seconds
_MOST_WAITING = 4  # writes in the queue; `give` blocks for a further one, so that memory stays bounded
_ROWS = 1 << 14  # of one message: a pull behind it waits for a few milliseconds
_UNDER_WAY = 4  # messages without a reply yet
CLOSED = (
    "fleet.stop_worker() was called, which closes the caches of rows of this worker. Train and predict before it; or "
    "save the model before it, and predict with fleet.load_inference_model."
)


class Write:
    """Rows with their state, by sorted keys."""

    def __init__(self, table: str, keys: torch.Tensor, rows: torch.Tensor, copied: Any, step: int) -> None:
        """`keys` (int64) and `rows`: host memory. `copied`: the CUDA event after which they are filled, or None."""
        self.table, self.step, self.is_done = table, step, threading.Event()
        self._copied = copied
        self._held: tuple[torch.Tensor, torch.Tensor] | None = keys, rows  # None: the servers have them

    def messages(self) -> Iterator[tuple[Any, Any]]:
        """Yield the (keys, rows) of each message. Without rows there is one empty message, which sets the step."""
        keys, rows = self._filled()
        for start in range(0, max(1, len(keys)), _ROWS):
            yield keys[start : start + _ROWS].view(np.uint64), rows[start : start + _ROWS]

    def rows_of(self, keys: Any) -> tuple[Any, Any]:
        """(mask of the keys that this write holds, their rows). Once the servers have the rows, it holds no keys."""
        own, rows = self._filled()
        if not len(own):
            return np.zeros(len(keys), bool), rows
        places = np.minimum(np.searchsorted(own, keys), len(own) - 1)
        is_found = own[places] == keys
        return is_found, rows[places[is_found]]

    def _filled(self) -> tuple[Any, Any]:
        held = self._held
        if held is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        if self._copied is not None:
            self._copied.synchronize()
        return held[0].numpy(), held[1].numpy()

    def finish(self) -> None:
        """Note that the servers have the rows, and release their memory."""
        self._held = None
        self.is_done.set()


class WriteBack:
    """Sends writes in the order in which they were given. After a failed write all later calls raise its error, because
    its rows exist nowhere else.
    """

    def __init__(self, connect: Callable[[], Client]) -> None:
        """`connect`: makes the thread's client."""
        self._connect = connect
        self._queue: queue.Queue[Write] = queue.Queue(_MOST_WAITING)
        self._ending = threading.Event()
        self._threads = BackgroundThreads([self._work], "rows of the cache could not be written to the servers")
        self._threads.start()

    def give(self, write: Write) -> None:
        """Have the thread send these rows. Waits only while too many writes are in the queue."""
        while True:
            self._check()
            try:
                self._queue.put(write, timeout=_LOOK)
                return
            except queue.Full:
                continue

    def wait(self, write: Write) -> None:
        """Wait until the servers have the rows."""
        while not write.is_done.wait(_LOOK):
            self._check()
        self._threads.check()

    def close(self) -> None:
        """End the thread and close its client. Later calls, and those that wait for a write, raise an error."""
        self._ending.set()
        self._threads.join(timeout=10)

    def _check(self) -> None:
        self._threads.check()
        if self._ending.is_set():
            raise FleetError(CLOSED)

    def _work(self) -> None:
        with self._connect() as client:
            while not self._ending.is_set():
                try:
                    write = self._queue.get(timeout=_LOOK)
                except queue.Empty:
                    continue
                under_way: deque[Future[None]] = deque()
                for keys, rows in write.messages():
                    under_way.append(client.assign_rows(write.table, keys, rows, write.step))
                    if len(under_way) >= _UNDER_WAY:
                        under_way.popleft().result()
                for answer in under_way:
                    answer.result()
                write.finish()
