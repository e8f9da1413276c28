"""What hybrid mode adds to a worker: its network, the exchange with other workers, and copies on the servers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from torchfleet.api.hybrid.dense_network import DenseNetwork
from torchfleet.api.hybrid.exchange_choice import network_device
from torchfleet.api.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.api.hybrid.kept_network import KeptNetwork
from torchfleet.api.hybrid.meeting_place import Gather, join_group
from torchfleet.base.errors import DataError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.meeting.attendance import Attendance
from torchfleet.collective.meeting.batch_agreement import Agreement
from torchfleet.collective.world import World
from torchfleet.ps.worker.client.client import Client


class HybridWorker:
    """All workers create it together, once the model has the servers' values.

    The network is exchanged among ranks of torch.distributed; RoundWorker exchanges it through the servers.
    """

    meets_at_end = True  # workers that have made their last step wait for each other
    _attendance: Attendance | None = None
    _has_met_at_end = False

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
        device = network_device(plan)
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
        self._worker_timeout = info.worker_timeout
        if store is not None:
            timeout = settings.sync_timeout
            self._attendance = Attendance(store, world.rank, world.size, timeout, self._is_one_lost, "worker")
            self._network.on_backward(self._attendance.begin_step)

    def agreed(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The batches of a loop. In training, all loops end as soon as one worker has no batch left; in prediction,
        each ends by itself. Raises DataError for files that the workers take from one list: they would wait for each
        other.
        """
        if self._agreement is None or not (torch.is_grad_enabled() and self._model.training):
            return loader
        if getattr(loader, "is_shared", False):
            raise DataError(
                "set_filelist(dynamic=True) gives workers different numbers of batches, and hybrid mode whose workers "
                "exchange the network as ranks of torch.distributed needs all of them in every step. Set "
                "a_sync_configs['exchange']='servers', or give each worker files of its own: fleet.split_files"
            )
        return self._agreement.batches(loader)

    def begin_lookup(self) -> None:
        """Called when rows are looked up for training."""
        self._network.begin_parts()

    def step_made(self) -> None:
        """Copy the network to the servers from time to time, for workers that restart."""
        if self._attendance is not None:
            self._attendance.end_step()
        if self._is_first:
            self._kept.put_if_due(self._client)

    def put_network(self) -> None:
        """Copy the network to the servers. Worker 0 calls it; all workers have the same network."""
        self._kept.put(self._client)

    def meet(self, what: str) -> None:
        """Wait for all workers at this place. Raises WorkerMissing if another worker waits for this one in a step."""
        if self._attendance is not None:
            self._attendance.meet(what)

    def meet_at_end(self) -> None:
        """Wait until all workers have made their last step, and sent the gradients of their rows. Later calls do
        nothing.
        """
        if not self._has_met_at_end:
            self._has_met_at_end = True
            self.meet("fleet.stop_worker()")

    def close(self, alone: bool = False) -> None:
        """Leave the process group after all workers have finished; with `alone`, without waiting. Later calls do
        nothing.
        """
        if not alone:
            self.meet_at_end()
        attendance, self._attendance = self._attendance, None
        if attendance is not None:
            attendance.close()
        self._network.close()
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()
        self._is_ours = False

    def stats(self) -> dict[str, Any]:
        """Statistics of the exchange through the servers, for fleet.stats(); empty without it."""
        return {}

    def _is_one_lost(self) -> bool:
        """Whether the servers consider a worker lost, after a long silence."""
        return any(worker["silent"] > 2 * self._worker_timeout for worker in self._client.stats()[0]["workers"])


def _flag_backend() -> str | None:
    """Flags are in host memory, which NCCL cannot send."""
    return None if os.environ.get("FLEET_DIST_BACKEND") else "gloo"
