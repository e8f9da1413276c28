"""The hybrid mode, as the servers see it: rows as in async mode, and no pushes to dense tables.

The workers synchronize the dense network by torch.distributed (api/hybrid). Each worker's push is applied as it
arrives, at the table's rate: rows learn from every worker's batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torchfleet.base.strategy.server_fields import AsyncConfigs
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.asynchronous import Async


def rows_of(plan: Plan) -> Plan:
    """The plan of what is pulled and pushed: everything except the dense tables, which only keep the network."""
    return dataclasses.replace(plan, dense=[])


class Hybrid(Async):
    """As Async, for rows alone."""

    takes_threads = False  # the workers make their steps together

    def __init__(self, client: Client, plan: Plan, connect: Callable[[], Client], configs: AsyncConfigs) -> None:
        super().__init__(client, rows_of(plan), connect, configs)
