"""What a worker of hybrid mode has beside its servers: the network, the other workers, and copies on the servers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from torchfleet.collective.world import World
from torchfleet.hybrid.batch_agreement import Agreement
from torchfleet.hybrid.dense_network import DenseNetwork
from torchfleet.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.hybrid.kept_network import KeptNetwork
from torchfleet.hybrid.meeting_place import Gather, join_group
from torchfleet.role import RoleInfo
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.worker.client.client import Client


class HybridWorker:
    """Made when the model has the servers' values, by all workers together."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: HybridOptimizer,
        settings: DistributedStrategy,
        info: RoleInfo,
        client: Client,
        gather: Gather,
    ) -> None:
        plan = optimizer.plan
        device = next((p.device for group in plan.dense for p in group.parameters), torch.device("cpu"))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._is_ours = not dist.is_initialized()
        if self._is_ours:
            join_group(info, device, settings.sync_timeout, gather)
        world = World(info, settings, device)
        self._model, self._client, self._is_first = model, client, info.worker_index == 0
        self._agreement = Agreement(world.rank, world.size, _flag_backend()) if world.size > 1 else None
        self._network = DenseNetwork(model, optimizer._user, plan, settings, info, world)
        seconds = settings.a_sync_configs.hybrid_keep_seconds
        self._kept = KeptNetwork(plan, self._network.optimizer, self._network.owns_state, seconds)
        self._kept.take(client)
        optimizer.join(self._network)

    def agreed(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The batches of a loop: in training, for as long as all workers have some; each worker predicts alone."""
        if self._agreement is None or not (torch.is_grad_enabled() and self._model.training):
            return loader
        return self._agreement.batches(loader)

    def step_made(self) -> None:
        """Now and then the servers get a copy of the network, for workers that start again."""
        if self._is_first:
            self._kept.put_if_due(self._client)

    def put_network(self) -> None:
        """The servers have the network as it is. On worker 0: all workers have the same."""
        self._kept.put(self._client)

    def close(self) -> None:
        """Leave the other workers."""
        self._network.close()
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()


def _flag_backend() -> str | None:
    """Flags lie in host memory, which NCCL cannot send."""
    return None if os.environ.get("FLEET_DIST_BACKEND") else "gloo"
