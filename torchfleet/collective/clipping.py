"""Gradient clipping by the norm of all gradients, when no rank has all of them (pipeline, sharding and others).

    total = sqrt(Σ_r Σ_{g on rank r} ‖g‖² / copies(g)),    g ← g · min(1, max_norm / (total + 1e-6))

where copies(g) ranks hold the same shard of a gradient. The ranks exchange one number. If every rank has the whole
model, this equals torch.nn.utils.clip_grad_norm_, which sees only the gradients of its own rank. The norm is known
before the step, and gradients are scaled within it: some strategies change or move them at its beginning. Source:
Pascanu et al. 2013.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from torchfleet.collective.tensors.local_tensors import shard
from torchfleet.collective.tensors.whole_norms import local_gradient, num_shards, shard_norms
from torchfleet.collective.world import World

Key = TypeVar("Key")


@torch.no_grad()
def total_norm(parameters: Iterable[torch.nn.Parameter], world: World, is_exchanged: bool) -> torch.Tensor:
    """The norm of all gradients, between backward and step. All ranks call it together.

    Without `is_exchanged` it is the norm of this rank's own gradients, and nothing is sent. The host does not wait for
    the device: the norm stays there.
    """
    own = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [local_gradient(parameter) for parameter in own]
    shares = [_num_shards(parameter, world) / world.size if is_exchanged else 1.0 for parameter in own]
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (share, _), alike in _grouped(gradients, [(s, g.device) for s, g in zip(shares, gradients, strict=True)]):
        total += (shard_norms(alike).double().square().sum() * share).to(world.device)
    if is_exchanged and world.size > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


@torch.no_grad()
def scale_down(parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place, so that their total norm, which is `norm`, becomes at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for (device, dtype), alike in _grouped(gradients, [(gradient.device, gradient.dtype) for gradient in gradients]):
        torch._foreach_mul_(alike, factor.to(device, dtype))  # some may be offloaded to host memory


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
    return world.degrees["pipe"] / copies * num_shards(parameter)
