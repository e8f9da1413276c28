"""Base of optimizers with a step size per layer (LARS, LAMB), and the norms of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchfleet.collective.closures import run_closure
from torchfleet.collective.local_tensors import local
from torchfleet.errors import FleetError, StrategyError


def check_inner(
    field: str, inner: torch.optim.Optimizer, expected: type[torch.optim.Optimizer], settings: Mapping[str, Any]
) -> None:
    """The user's optimizer is exactly an `expected` one, with these settings in every group; else an error."""
    if type(inner) is not expected:
        raise StrategyError(
            f"{field}=True needs a torch.optim.{expected.__name__}, found {type(inner).__name__}: use "
            f"torch.optim.{expected.__name__}, or leave {field} out"
        )
    for group in inner.param_groups:
        for name, value in settings.items():
            if group.get(name, value) != value:
                raise StrategyError(
                    f"{field}=True and {expected.__name__}'s {name}={group[name]} contradict each other: {field} has a "
                    f"rule of its own. Use {name}={value}, or leave {field} out."
                )


def check_momentum(field: str, inner: torch.optim.Optimizer) -> None:
    """Every group of an SGD has momentum."""
    if any(not group["momentum"] > 0 for group in inner.param_groups):
        raise StrategyError(f"{field}=True needs torch.optim.SGD with momentum, found momentum=0: set it, 0.9 say")


def is_excluded(names: Mapping[torch.Tensor, str], fragments: Sequence[Any]) -> Callable[[torch.Tensor], bool]:
    """Tells whether a parameter's name contains one of `exclude_from_weight_decay`."""
    if not all(isinstance(fragment, str) and fragment for fragment in fragments):
        raise StrategyError(f"exclude_from_weight_decay expects parts of names of parameters, found {fragments!r}")
    excluded = {parameter for parameter, name in names.items() if any(fragment in name for fragment in fragments)}
    return excluded.__contains__


class ReplacingOptimizer(torch.optim.Optimizer):
    """Steps in the place of `inner` on the very same groups, so that a scheduler of either changes both."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        for group in self.param_groups:
            self.step_group(group, [parameter for parameter in group["params"] if parameter.grad is not None])
        return loss

    def step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """One step of the group's parameters that have gradients."""
        raise NotImplementedError

    def local_state(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """The tensors of that name in the parameters' states, zeros at first: what this rank holds of them."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [local(self.state[parameter][name]) for parameter in parameters]


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the gradient, sharded as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise FleetError("lars and lamb need dense gradients, found a sparse one: use Embedding(sparse=False)")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def norms(shards: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of whole tensors whose `shards` this rank has, sharded as `parameters` are; a vector, not waited for.

    The squares of the shards are summed over the ranks that hold them, all tensors' at once: these ranks come here
    together. In float32, or float64 if one of them is.
    """
    kind = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
    found = torch.stack([torch.linalg.vector_norm(shard, dtype=kind) for shard in shards])
    cuts: dict[tuple[DeviceMesh, int], list[int]] = {}
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, DTensor):
            continue
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                cuts.setdefault((parameter.device_mesh, dim), []).append(index)
    if not cuts:
        return found
    squares = found.square()
    for (mesh, dim), indices in cuts.items():
        chosen = torch.tensor(indices, device=squares.device)
        summed = squares[chosen]
        dist.all_reduce(summed, group=mesh.get_group(dim))
        squares[chosen] = summed
    return squares.sqrt()
