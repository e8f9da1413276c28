"""Gradient clipping by the norm of all gradients, when no rank has all of them (pipeline, sharding and others).

    total = sqrt(Σ_r Σ_{g on rank r} ‖g‖² / copies(g)),    g ← g · min(1, max_norm / (total + 1e-6))

where copies(g) ranks hold the very same shard of a gradient. One number is exchanged. Where every rank has the whole
model this is torch.nn.utils.clip_grad_norm_, which sees the gradients of one rank alone. Source: Pascanu et al. 2013.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from torchfleet.collective.buckets import buckets
from torchfleet.collective.local_tensors import local
from torchfleet.collective.whole_norms import local_gradient, num_shards, shard_norms
from torchfleet.collective.world import World
from torchfleet.errors import FleetError


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float, world: World) -> torch.Tensor:
    """Clip in place, between backward and step; returns the norm there was. All ranks call it together.

    Nothing is waited for: the norm and the factor stay on the device.
    """
    if not max_norm > 0:
        raise FleetError(f"clip_grad_norm: max_norm must be positive, found {max_norm}")
    own = [parameter for parameter in parameters if parameter.grad is not None]
    alike: dict[int, list[torch.Tensor]] = {}  # number of shards → gradients
    for parameter in own:
        alike.setdefault(_num_shards(parameter, world), []).append(local_gradient(parameter))
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for num, gradients in alike.items():
        total += shard_norms(gradients).double().square().sum() * (num / world.size)
    if world.size > 1:
        dist.all_reduce(total)
    total = total.sqrt().float()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for bucket in buckets(local(parameter.grad) for parameter in own if parameter.grad is not None):
        torch._foreach_mul_(bucket, factor.to(bucket[0].dtype))
    return total


def _num_shards(parameter: torch.Tensor, world: World) -> int:
    """Into how many shards it is cut, each on equally many ranks; a stage of a pipeline is a shard of the model."""
    if hasattr(parameter, "fleet_piece"):
        return int(parameter.fleet_piece[2])
    return world.degrees["pipe"] * num_shards(parameter)
