"""The hybrid mode, as the servers see it: rows as in async mode, and no pushes to dense tables.

The workers synchronize the dense network by torch.distributed (api/hybrid). Each worker's push is applied as it
arrives, at the table's rate: rows learn from every worker's batch.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from torchfleet.base.strategy.server_fields import AsyncConfigs
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Dense, Future
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.asynchronous import Async
from torchfleet.ps.worker.modes.communicator import Gradients

_FEW_BYTES = 1 << 18  # of gradients that the training thread sends: another thread would cost more than it saves


def rows_of(plan: Plan) -> Plan:
    """The plan of what is pulled and pushed: everything except the dense tables, which only keep the network."""
    return dataclasses.replace(plan, dense=[])


class Hybrid(Async):
    """As Async, for rows alone. If there are few gradients, the training thread sends them, and awaits the reply later:
    up to `send_queue_size` of these pushes are in flight.
    """

    takes_threads = False  # the workers make their steps together

    def __init__(self, client: Client, plan: Plan, connect: Callable[[], Client], configs: AsyncConfigs) -> None:
        super().__init__(client, rows_of(plan), connect, configs)
        self._under_way: deque[Future[Dense]] = deque()
        self._sends_few = configs.thread_pool_size == 1 and configs.max_merge_var_num == 1

    def _push(self, gradients: Gradients) -> None:
        num_bytes = sum(keys.nbytes + rows.nbytes for keys, rows in gradients.sparse.values())
        if not self._sends_few or num_bytes > _FEW_BYTES or self._has_open(self._num_given):
            super()._push(gradients)
            return
        self._threads.check()
        while len(self._under_way) >= self._configs.send_queue_size:
            self._under_way.popleft().result()
        self._under_way.append(self._submit(self._client, gradients, 0))
        with self._lock:
            self._num_sent += 1

    def settle(self) -> None:
        while self._under_way:
            self._under_way.popleft().result()
        super().settle()

    def stats(self) -> dict[str, Any]:
        found = super().stats()
        return {**found, "queue": found["queue"] + sum(not push.is_done for push in self._under_way)}
