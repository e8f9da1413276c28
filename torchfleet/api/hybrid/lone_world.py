"""A world of one rank without a process group, for a network that is exchanged through the servers."""

from __future__ import annotations

import torch

from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.world import Axis, Gathering, World, degrees


class LoneWorld(World):
    """For the strategies of collective training, a worker is alone: what they do to its network is local.

    Strategies that exchange among ranks are refused before this is created (exchange_choice.py).
    """

    def __init__(self, info: RoleInfo, strategy: DistributedStrategy, device: torch.device) -> None:
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, info.local_rank, 1
        self.degrees, self.device = degrees(strategy, 1), device
        self._is_ours = False
        self._mesh = self._control = None
        self._replicas = self._context = Axis(0, 1, None)
        self.context_degree = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def aside(self) -> Gathering:
        return self

    def barrier(self) -> None:
        """Do nothing: no other rank can come."""

    def close(self, alone: bool = False) -> None:
        """Do nothing: there is no process group."""
