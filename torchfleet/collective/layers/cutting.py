"""Parameters of layers cut over the ranks that share them: they become DTensors, and those that were tied stay tied."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from torchfleet.base.errors import ModelError


def cut_parameters(layer: torch.nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Replace parameters of the layer by this rank's shards of them; names that it does not have are skipped."""
    for name, placement in placements.items():
        whole = layer._parameters.get(name)
        if whole is not None:
            layer._parameters[name] = torch.nn.Parameter(_cut(whole.detach(), mesh, placement), whole.requires_grad)


def uses(model: torch.nn.Module) -> list[list[str]]:
    """The names of each parameter that has several names."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [found for found in names.values() if len(found) > 1]


def tie_again(model: torch.nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters that were tied before; layers that use them must be sharded alike.

    A module that contains layers only has another name for a layer's parameter: it gets the same one again.
    """
    for names in tied:
        users = [name for name in names if not any(_owner(model, name).children())] or names
        first, *others = users
        one = model.get_parameter(first)
        for name in others:
            if getattr(one, "placements", None) != getattr(model.get_parameter(name), "placements", None):
                raise ModelError(
                    f"tensor_parallel: '{first}' and '{name}' are one parameter, and the two layers are cut in "
                    "different ways. An embedding cut by its rows ('vocab' in a plan, VocabParallelEmbedding) goes "
                    "with a layer cut by its outputs ('vocab', ColumnParallelLinear); or make them two."
                )
        for name in names:
            _owner(model, name)._parameters[name.rpartition(".")[2]] = one


def _owner(model: torch.nn.Module, name: str) -> torch.nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _cut(whole: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Shard a tensor. `whole` has no values yet (first_values.py), so nothing is sent."""
    assert whole.is_meta
    own = whole
    if isinstance(placement, Shard):
        width = math.ceil(whole.shape[placement.dim] / mesh.size())
        start = min(width * mesh.get_local_rank(), whole.shape[placement.dim])
        length = min(width, whole.shape[placement.dim] - start)
        own = whole.narrow(placement.dim, start, length).contiguous()
    return DTensor.from_local(own, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
