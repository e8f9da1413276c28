"""Gradient clipping by the norm of all gradients, when no rank has all of them (pipeline, sharding and others).

    total = sqrt(Σ_r Σ_{g on rank r} ‖g‖² / copies(g)),    g ← g · min(1, max_norm / (total + 1e-6))

where copies(g) ranks hold the very same shard of a gradient. One number is exchanged. Where every rank has the whole
model this is torch.nn.utils.clip_grad_norm_, which sees the gradients of one rank alone. Source: Pascanu et al. 2013.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchfleet.collective.local_tensors import local
from torchfleet.collective.world import World
from torchfleet.errors import FleetError


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float, world: World) -> torch.Tensor:
    """Clip in place, between backward and step; returns the norm there was. All ranks call it together."""
    if not max_norm > 0:
        raise FleetError(f"clip_grad_norm: max_norm must be positive, found {max_norm}")
    own = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for parameter in own:
        norm = torch.linalg.vector_norm(_gradient(parameter), dtype=torch.float32).double()
        total += norm.square() * _num_shards(parameter, world) / world.size
    if world.size > 1:
        dist.all_reduce(total)
    total = total.sqrt().float()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in own:
        gradient = _gradient(parameter)
        gradient.mul_(factor.to(gradient.device, gradient.dtype))  # which may be offloaded to host memory
    return total


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard."""
    gradient = parameter.grad
    assert gradient is not None
    return local(gradient)


def _num_shards(parameter: torch.Tensor, world: World) -> float:
    """Into how many shards it is cut, each on equally many ranks; a stage of a pipeline is a shard of the model.

    Of a parameter that several stages have (`fleet_copies`) the copies count as one.
    """
    if hasattr(parameter, "fleet_piece"):
        return int(parameter.fleet_piece[2])
    num = world.degrees["pipe"] / getattr(parameter, "fleet_copies", 1)
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            num *= parameter.device_mesh.size(dim) if placement.is_shard() else 1
    return num
