"""The device on which a process of a job computes."""

from __future__ import annotations

import os

import torch

from torchfleet.base.errors import FleetError
from torchfleet.base.role.role_info import SERVER, RoleInfo


def device_of(info: RoleInfo) -> torch.device:
    """The GPU of a worker, heter worker or rank, by its index on its machine; the CPU without GPUs, for servers, and
    with FLEET_DEVICE=cpu.

    Workers, and heter workers, share GPUs if there are too few. Ranks cannot: one without a GPU raises FleetError.
    """
    if info.role == SERVER or os.environ.get("FLEET_DEVICE", "") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    num = torch.cuda.device_count()
    if not info.is_collective:
        return torch.device("cuda", info.index_on_machine % num)
    if info.local_rank >= num:
        raise FleetError(
            f"local rank {info.local_rank} has no GPU: there are {num}. Start at most one process per GPU, or set "
            "FLEET_DEVICE=cpu."
        )
    return torch.device("cuda", info.local_rank)
