"""The async mode with max_staleness: nobody's network becomes older than that, so whoever is too far ahead waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from torchfleet.base.errors import StrategyError
from torchfleet.ps.net.wire import BOUNDED, DENSE_BACK, VERSIONS
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Dense, Future
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.communicator import Communicator, Gradients


class Bounded(Communicator):
    """A push is on its way when `step` returns; its reply, which brings the network, is awaited where the model is
    called next. The servers hold a push that would make another worker's network too old.

    From a call of the model with gradients to its push the servers count on this worker. Where it rests, it says so.
    """

    pulls_ahead = True
    takes_threads = False  # a server knows one network of each worker

    def __init__(
        self,
        client: Client,
        plan: Plan,
        connect: Callable[[], Client],
        max_staleness: int,
        num_workers: int,
        timeout: float,
    ) -> None:
        """`timeout`: seconds that a push may be held."""
        if max_staleness < num_workers - 1:
            raise StrategyError(
                f"a_sync_configs['max_staleness']={max_staleness} cannot be kept with {num_workers} workers: the last "
                f"of them to push comes after all others. Use at least {num_workers - 1}, or sync mode."
            )
        super().__init__(client, plan, connect)
        self._max_staleness, self._timeout = max_staleness, timeout
        self._names = [group.spec.name for group in plan.dense]
        self._under_way: Future[Dense] | None = None
        self._is_counted = False  # the servers count on this worker's next push
        self._is_over = False

    def freshen(self) -> None:
        self._take()
        if not self._is_counted and not self._is_over and torch.is_grad_enabled():
            self._write(self._client.pull_dense_tables(self._names, is_bounded=True).result())
            self._is_counted = True
        super().freshen()

    def _push(self, gradients: Gradients) -> None:
        self._take()  # if the model was not called as a whole
        flags = BOUNDED | DENSE_BACK | VERSIONS
        self._under_way = self._client.push_tables(
            {**gradients.dense, **gradients.sparse},
            gradients.rates,
            gradients.versions,
            flags,
            self._timeout,
            settings=[self._max_staleness],
            are_finite=gradients.are_finite,
        )
        self._is_counted = True

    def settle(self) -> None:
        self._take()

    def rest(self) -> None:
        if threading.get_ident() != self._main_thread:
            return  # training goes on beside it
        self._take()
        if self._is_counted:
            self._client.push_tables({}, flags=BOUNDED, settings=[self._max_staleness]).result()
            self._is_counted = False

    def flush(self) -> None:
        self.rest()
        super().flush()
        self._write(self._pull_dense(self._client))

    def stop(self) -> None:
        super().stop()
        self._is_over = True

    def _take(self) -> None:
        """Wait for the reply of the last push, and write the network that it brings."""
        if self._under_way is None:
            return
        start = time.perf_counter()
        under_way, self._under_way = self._under_way, None
        values = under_way.result()
        # A reply that had to be repeated brings no values; the servers still count on this worker from then on.
        self._write(values or self._pull_dense(self._client))
        self._seconds["dense"] += time.perf_counter() - start
