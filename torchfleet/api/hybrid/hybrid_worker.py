"""What a worker of hybrid mode has beside its servers: the network, the other workers, and copies on the servers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from torchfleet.api.hybrid.dense_network import DenseNetwork
from torchfleet.api.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.api.hybrid.kept_network import KeptNetwork
from torchfleet.api.hybrid.meeting_place import Gather, join_group
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.meeting.attendance import Attendance
from torchfleet.collective.meeting.batch_agreement import Agreement
from torchfleet.collective.world import World
from torchfleet.ps.worker.client.client import Client


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
        store = join_group(info, device, settings.sync_timeout, gather) if self._is_ours else None
        world = World(info, settings, device)
        self._model, self._client, self._is_first = model, client, info.worker_index == 0
        self._agreement = Agreement(world.rank, world.size, _flag_backend(), "worker") if world.size > 1 else None
        self._network = DenseNetwork(model, optimizer.user, plan, settings, info, world)
        seconds = settings.a_sync_configs.hybrid_keep_seconds
        self._kept = KeptNetwork(plan, self._network.optimizer, self._network.owns_state, seconds)
        self._kept.take(client)
        optimizer.join(self._network)
        self._worker_timeout, self._attendance = info.worker_timeout, None
        if store is not None:
            timeout = settings.sync_timeout
            self._attendance = Attendance(store, world.rank, world.size, timeout, self._is_one_lost, "worker")
            self._network.on_backward(self._attendance.begin_step)

    def agreed(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The batches of a loop: in training, for as long as all workers have some; each worker predicts alone."""
        if self._agreement is None or not (torch.is_grad_enabled() and self._model.training):
            return loader
        return self._agreement.batches(loader)

    def begin_lookup(self) -> None:
        """Rows are looked up for training."""
        self._network.begin_parts()

    def step_made(self) -> None:
        """Now and then the servers get a copy of the network, for workers that start again."""
        if self._attendance is not None:
            self._attendance.end_step()
        if self._is_first:
            self._kept.put_if_due(self._client)

    def put_network(self) -> None:
        """The servers have the network as it is. On worker 0: all workers have the same."""
        self._kept.put(self._client)

    def meet(self, what: str) -> None:
        """All workers come to this place. Raises WorkerMissing if one waits in a step for this one."""
        if self._attendance is not None:
            self._attendance.meet(what)

    def close(self, alone: bool = False) -> None:
        """Leave the other workers, once all have come to the end; `alone`: without waiting for them. Once is enough."""
        if not alone:
            self.meet("fleet.stop_worker()")
        attendance, self._attendance = self._attendance, None
        if attendance is not None:
            attendance.close()
        self._network.close()
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()
        self._is_ours = False

    def _is_one_lost(self) -> bool:
        """Whether a worker has been silent for so long that the servers take it for lost."""
        return any(worker["silent"] > 2 * self._worker_timeout for worker in self._client.stats()[0]["workers"])


def _flag_backend() -> str | None:
    """Flags lie in host memory, which NCCL cannot send."""
    return None if os.environ.get("FLEET_DIST_BACKEND") else "gloo"
