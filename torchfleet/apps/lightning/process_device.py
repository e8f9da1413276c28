"""The device of each process of a Trainer, chosen by the process's index on its machine."""

from __future__ import annotations

import os
from typing import Any

import torch

from torchfleet.base.errors import StrategyError
from torchfleet.base.role.role_info import SERVER, RoleInfo


class ProcessDevice:
    """Assigns the devices of a machine to its processes. Servers get none: rows stay in host memory."""

    _info: RoleInfo
    parallel_devices: Any  # the devices that Lightning's Trainer would use: on a machine with GPUs, all of them

    @property
    def local_rank(self) -> int:
        """The index of the process on its machine, from 0; servers are numbered after all workers."""
        info = self._info
        if info.is_collective:
            return info.local_rank
        if info.role == SERVER:
            return info.num_workers + info.server_index
        return info.index_on_machine

    @property
    def root_device(self) -> torch.device:
        """The GPU with this process's index on its machine. Workers share GPUs if there are too few."""
        if not self._has_gpus or self._info.role == SERVER:
            return torch.device("cpu")
        if self._info.is_collective:
            return torch.device("cuda", self.local_rank)  # as in every collective job
        if self._info.num_workers == 1 and len(self.parallel_devices) == 1:
            return self.parallel_devices[0]  # type: ignore[no-any-return]  # Trainer(devices=[1])
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @property
    def _has_gpus(self) -> bool:
        return bool(self.parallel_devices) and self.parallel_devices[0].type == "cuda"

    def check_devices(self) -> None:
        """Raise StrategyError for devices that this process cannot use."""
        asked = len(self.parallel_devices or [0])
        if not self._has_gpus:
            if asked > 1:
                raise StrategyError(
                    f"FleetStrategy: expected one device for each process, found devices={asked}: leave it at 1, and "
                    "start more processes with fleetrun --worker_num"
                )
            return
        there = torch.cuda.device_count()
        if asked not in (1, there):
            raise StrategyError(
                f"FleetStrategy: expected one GPU for each process, found devices={asked} on a machine with {there}: "
                "leave it out, each process takes the next GPU. CUDA_VISIBLE_DEVICES, or fleetrun --gpus for ranks, "
                "says which are used"
            )
        if self._info.is_collective and os.environ.get("FLEET_DEVICE") == "cpu":
            raise StrategyError(
                "FLEET_DEVICE=cpu keeps the ranks off the GPUs, but the Trainer would use them: say "
                "Trainer(accelerator='cpu')"
            )
        if self._info.is_collective and self.local_rank >= there:
            raise StrategyError(
                f"FleetStrategy: rank {self.local_rank} of this machine has no GPU: there are {there}. Start at most "
                "one rank for each, or set FLEET_DEVICE=cpu and say Trainer(accelerator='cpu')"
            )
