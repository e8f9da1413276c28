"""Gradient clipping by the norm of all gradients, when no rank has all of them (pipeline, sharding and others).

    total = sqrt(Σ_r Σ_{g on rank r} ‖g‖² / copies(g)),    g ← g · min(1, max_norm / (total + 1e-6))

where copies(g) ranks hold the same shard of a gradient. The ranks exchange one number. If every rank has the whole
model, this equals torch.nn.utils.clip_grad_norm_, which sees only the gradients of its own rank. Source: Pascanu et al.
2013.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from torchfleet.base.errors import FleetError
from torchfleet.collective.tensors.local_tensors import shard
from torchfleet.collective.tensors.whole_norms import local_gradient, num_shards, shard_norms
from torchfleet.collective.world import World

Key = TypeVar("Key")


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float, world: World) -> torch.Tensor:
    """Clip in place, between backward and step; returns the norm before clipping. All ranks call it together.

    The host does not wait for the device: the norm and the factor stay there.
    """
    if not max_norm > 0:
        raise FleetError(f"clip_grad_norm: max_norm must be positive, found {max_norm}")
    own = [parameter for parameter in parameters if parameter.grad is not None and _shares(parameter)]
    gradients = [local_gradient(parameter) for parameter in own]
    nums = [_num_shards(parameter, world) for parameter in own]
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (num, _), alike in _grouped(gradients, [(n, g.device) for n, g in zip(nums, gradients, strict=True)]):
        total += (shard_norms(alike).double().square().sum() * (num / world.size)).to(world.device)
    if world.size > 1:
        dist.all_reduce(total)
    total = total.sqrt().float()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    gradients = [shard(parameter.grad) for parameter in own if parameter.grad is not None]
    for (device, dtype), alike in _grouped(gradients, [(gradient.device, gradient.dtype) for gradient in gradients]):
        torch._foreach_mul_(alike, factor.to(device, dtype))  # some may be offloaded to host memory
    return total


def _grouped(tensors: list[torch.Tensor], keys: list[Key]) -> Iterable[tuple[Key, list[torch.Tensor]]]:
    """Group tensors by key. torch's foreach functions are fast for tensors of one device and dtype."""
    found: dict[Key, list[torch.Tensor]] = {}
    for key, tensor in zip(keys, tensors, strict=True):
        found.setdefault(key, []).append(tensor)
    return found.items()


def _num_shards(parameter: torch.Tensor, world: World) -> float:
    """The number of shards, each on equally many ranks; a stage of a pipeline is a shard of the model.

    The copies of a parameter that several stages have (`fleet_copies`) count as one.
    """
    marks = parameter.__dict__  # getattr is slow for missing attributes
    if "fleet_piece" in marks:
        return float(marks["fleet_piece"][2])
    copies: int = marks.get("fleet_copies", 1)
    return world.degrees["pipe"] * _shares(parameter) / copies * num_shards(parameter)


def _shares(parameter: torch.Tensor) -> int:
    """How many ranks share out the float32 copies; 0 if another rank has this one's copy, 1 without copies."""
    return int(parameter.__dict__.get("fleet_shares", 1))
