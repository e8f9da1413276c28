"""The async mode: gradients go into a bounded queue, threads merge and send them, training does not wait."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from torchfleet.base.background import BackgroundThreads, Work
from torchfleet.base.strategy.server_fields import AsyncConfigs
from torchfleet.base.tracing.span_recorder import mark, part_of
from torchfleet.ps.kernels.merge import sum_by_key
from torchfleet.ps.tables.rows.row_statistics import is_pushed
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Dense, Future
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.lookup.sources import PullAhead
from torchfleet.ps.worker.modes.communicator import Communicator, Gathering, Gradients

_LOOK = 0.001  # seconds between two polls of an empty queue


class Async(Communicator):
    """Senders have clients of their own. Dense values are requested at the end of a step, and awaited at the model's
    next call: the work in between hides the latency, and the values are no staler than that.
    """

    pulls_ahead = True

    def __init__(
        self,
        client: Client,
        plan: Plan,
        connect: Callable[[], Client],
        configs: AsyncConfigs,
        gathering: Gathering | None = None,
    ) -> None:
        super().__init__(client, plan, connect, gathering)
        self._configs = configs
        self._wide = {name for name, group in plan.sparse.items() if is_pushed(group.spec)}
        self._queue: queue.Queue[tuple[int, Gradients]] = queue.Queue(configs.send_queue_size)
        self._num_given = 0
        self._open: set[int] = set()  # numbers of steps whose gradients have not been applied
        self._ending = threading.Event()
        self._receive_now = threading.Event()
        self._lock = threading.Lock()
        self._fresh = Dense()  # values that the receiver thread has pulled
        self._num_sent = self._num_merged = self._num_flushes = 0
        loops = [self._send_loop] * configs.thread_pool_size
        if configs.independent_recv_thread:
            loops.append(self._receive_loop)
        self._threads = BackgroundThreads(
            [self._with_client(loop) for loop in loops], "a thread of the communicator failed"
        )

    def start(self) -> None:
        self._threads.start()

    def pull(self, keys: Any, create: bool, foreseen: bool = False) -> PullAhead:
        self._threads.check()
        return super().pull(keys, create, foreseen)

    def freshen(self) -> None:
        self._take_dense()
        super().freshen()

    def send_written(self) -> None:
        self._take_dense()  # they were pulled before
        super().send_written()

    def _push(self, gradients: Gradients) -> None:
        self._take_dense()  # if the model was not called as a whole
        with self._lock:
            self._num_given += 1
            number = self._num_given
            self._open.add(number)
        gradients.mark = mark()
        while True:  # a full queue blocks training, so memory stays bounded
            self._threads.check()
            try:
                self._queue.put((number, gradients), timeout=0.1)
                break
            except queue.Full:
                continue
        if not self._configs.independent_recv_thread and number % self._configs.min_send_grad_num_before_recv == 0:
            self._ask_dense()

    def _ask_dense(self) -> None:
        names = [group.spec.name for group in self._plan.dense]
        if names:
            self._own.under_way = self._client.pull_dense_tables(names)

    def _take_dense(self) -> None:
        """Write the dense values that this thread has requested, waiting for them, or those of the receiver thread."""
        start = time.perf_counter()
        with self._lock:
            values, self._fresh = self._fresh, Dense()
        under_way: Future[Dense] | None = getattr(self._own, "under_way", None)
        if under_way is not None:
            self._own.under_way = None
            values = under_way.result()
        if values:
            self._write(values)
            self._seconds["dense"] += time.perf_counter() - start

    def _await_values(self) -> None:
        self._await_sent()
        self._own.under_way = None  # its values are older
        self._write(self._pull_dense(self._client))

    def settle(self) -> None:
        self._await_sent()
        super().settle()

    def _await_sent(self) -> None:
        """Wait until all gradients given so far have been applied."""
        last = self._num_given
        while self._has_open(last):
            self._threads.check()
            time.sleep(_LOOK)
        self._threads.check()

    def flush(self) -> None:
        self.send_written()
        self.settle()
        self._own.under_way = None  # its values are older
        values = self._pull_dense(self._client)
        with self._lock:
            self._fresh = Dense()
            self._num_flushes += 1
        self._write(values)

    def _has_open(self, last: int) -> bool:
        """Whether a step up to number `last` has not been applied."""
        with self._lock:
            return bool(self._open) and min(self._open) <= last

    def stop(self) -> None:
        try:
            self.flush()
        finally:
            self._ending.set()
            self._receive_now.set()
            self._threads.join(timeout=10)

    def stats(self) -> dict[str, Any]:
        sent = {"pushes": self._num_sent, "merged": self._num_merged}
        return {**super().stats(), "queue": self._queue.qsize(), "queue_size": self._queue.maxsize, **sent}

    def _send_loop(self, client: Client) -> None:
        while not self._ending.is_set():
            taken = self._take()
            if not taken:
                continue
            merged = merge([gradients for _, gradients in taken], self._wide)
            with self._lock:
                self._num_sent += 1
                self._num_merged += len(taken) - 1
                refresh = self._num_sent % self._configs.min_send_grad_num_before_recv == 0
            with part_of([gradients.mark for _, gradients in taken], "sender"):
                self._submit(client, merged, 0).result()
            if refresh:
                self._receive_now.set()
            with self._lock:
                self._open.difference_update(number for number, _ in taken)
            for _ in taken:
                self._queue.task_done()

    def _receive_loop(self, client: Client) -> None:
        while not self._ending.is_set():
            if self._receive_now.wait(0.1) and not self._ending.is_set():
                self._receive_now.clear()
                num = self._num_flushes
                values = self._pull_dense(client)
                with self._lock:
                    if num == self._num_flushes:  # else a flush has pulled meanwhile, and these may be older
                        self._fresh = values

    def _take(self) -> list[tuple[int, Gradients]]:
        """The next gradients, and more of them if they arrive within `send_wait_times` polls."""
        try:
            taken = [self._queue.get(timeout=0.1)]
        except queue.Empty:
            return []
        looks = 0
        while len(taken) < self._configs.max_merge_var_num:
            try:
                taken.append(self._queue.get_nowait())
            except queue.Empty:
                looks += 1
                if looks > self._configs.send_wait_times:
                    break
                time.sleep(_LOOK)
        return taken

    def _with_client(self, loop: Callable[[Client], None]) -> Work:
        def run() -> None:
            with self._connect() as client:
                loop(client)

        return run


def merge(gradients: list[Gradients], wide: Collection[str] = ()) -> Gradients:
    """Merge several steps into one push: summed gradients, the latest rates, the oldest versions.

    `wide`: tables whose gradients are followed by show, click and slot. A slot must not be summed here: the servers sum
    those gradients.
    """
    first = gradients[0]
    if len(gradients) == 1:
        return first
    sparse, dense, rates, versions = {}, {}, {}, {}
    for step in gradients:  # of several optimizers, each with tables of its own
        rates.update(step.rates)
        versions.update({table: seen for table, seen in step.versions.items() if table not in versions})
    for table in {table: None for step in gradients for table in step.sparse}:
        pushes = [step.sparse[table] for step in gradients if table in step.sparse]
        keys, rows = (np.concatenate(arrays) for arrays in zip(*pushes, strict=True))
        sparse[table] = (keys, rows) if table in wide else sum_by_key(keys, rows)
    for table in {table: None for step in gradients for table in step.dense}:
        dense[table] = np.stack([step.dense[table] for step in gradients if table in step.dense]).sum(axis=0)
    return Gradients(sparse, versions, dense, rates)  # async pushes are never gathered, so num_samples is not used
