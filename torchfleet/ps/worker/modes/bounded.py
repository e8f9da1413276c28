"""The async mode with max_staleness: a worker too far ahead waits, so that no worker's dense values
exceed the bound.
"""

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
    """A push is in flight when `step` returns. Its reply, which brings the dense values, is awaited at the model's next
    call. The servers delay a push that would make another worker's dense values too stale.

    From a call of the model with gradients until its push, the servers expect a push of this worker. `rest` ends this.
    """

    pulls_ahead = True
    takes_threads = False  # a server tracks one set of dense values per worker

    def __init__(
        self,
        client: Client,
        plan: Plan,
        connect: Callable[[], Client],
        max_staleness: int,
        num_workers: int,
        timeout: float,
    ) -> None:
        """`timeout`: seconds that a push may be delayed."""
        if max_staleness < num_workers - 1:
            raise StrategyError(
                f"a_sync_configs['max_staleness']={max_staleness} is too small for {num_workers} workers: the last "
                f"worker to push is already {num_workers - 1} updates behind. Use at least that many, or sync mode."
            )
        super().__init__(client, plan, connect)
        self._max_staleness, self._timeout = max_staleness, timeout
        self._names = [group.spec.name for group in plan.dense]
        self._under_way: Future[Dense] | None = None
        self._is_counted = False  # the servers expect this worker's next push
        self._is_over = False
        self._is_lifted = False

    def freshen(self) -> None:
        self._take()
        if not torch.is_grad_enabled():
            if not self._is_computing:
                self.rest()  # this worker predicts, for an unknown time
        elif not self._is_over and not self._is_lifted:
            if not self._is_counted:
                self._write(self._client.pull_dense_tables(self._names, is_bounded=True).result())
            self._is_counted = True
        super().freshen()

    def send_written(self) -> None:
        self._take()  # the values were sent before
        super().send_written()

    def _push(self, gradients: Gradients) -> None:
        self._take()  # if the model was not called as a whole
        flags = DENSE_BACK | VERSIONS | (0 if self._is_lifted else BOUNDED)
        self._under_way = self._client.push_tables(
            {**gradients.dense, **gradients.sparse},
            gradients.rates,
            gradients.versions,
            flags,
            self._timeout,
            settings=[] if self._is_lifted else [self._max_staleness],
            are_finite=gradients.are_finite,
        )
        self._is_counted = not self._is_lifted

    def _await_values(self) -> None:
        self._take()

    def settle(self) -> None:
        self.write_back()
        self._take()

    def rest(self) -> None:
        if threading.get_ident() != self._main_thread:
            return  # training goes on meanwhile
        self._take()
        if self._is_counted:
            self._client.push_tables({}, flags=BOUNDED, settings=[self._max_staleness]).result()
            self._is_counted = False

    def lift(self) -> None:
        """Lift the bound for this worker: from now on the servers neither delay its pushes nor expect them."""
        self.rest()
        self._is_lifted = True

    def flush(self) -> None:
        self.rest()
        super().flush()

    def stop(self) -> None:
        super().stop()
        self._is_over = True

    def _take(self) -> None:
        """Wait for the reply to the last push, and write the dense values that it brings."""
        if self._under_way is None:
            return
        start = time.perf_counter()
        under_way, self._under_way = self._under_way, None
        values = under_way.result()
        # The reply to a retry brings no values; the servers still expect this worker's push from then on.
        self._write(values or self._pull_dense(self._client))
        self._seconds["dense"] += time.perf_counter() - start
