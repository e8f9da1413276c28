"""Optimizers with a step size per layer: how they replace the user's, and the norms of whole tensors they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

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


def is_excluded(names: Mapping[torch.Tensor, str], parts_of_names: Sequence[Any]) -> Callable[[torch.Tensor], bool]:
    """Tells whether a parameter's name contains one of `exclude_from_weight_decay`."""
    if not all(isinstance(part, str) and part for part in parts_of_names):
        raise StrategyError(f"exclude_from_weight_decay expects parts of names of parameters, found {parts_of_names!r}")
    excluded = {parameter for parameter, name in names.items() if any(part in name for part in parts_of_names)}
    return excluded.__contains__


class Replacing(torch.optim.Optimizer):
    """Steps in the place of `inner` on the very same groups, so that whoever changes a learning rate there is heard."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group, [one for one in group["params"] if one.grad is not None])
        return loss

    def step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """One step of the group's parameters that have gradients."""
        raise NotImplementedError

    def part_of_state(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """The tensors of that name in the parameters' states, zeros at first: what this rank holds of them."""
        for one in parameters:
            if name not in self.state[one]:
                self.state[one][name] = torch.zeros_like(one)
        return [local(self.state[one][name]) for one in parameters]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, the same memory; all of it unless it is cut over ranks (DTensor)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient, cut as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise FleetError("lars and lamb need dense gradients, found a sparse one: use Embedding(sparse=False)")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def norms(parts: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of whole tensors of which this rank has `parts`, cut as `parameters` are; a vector, not waited for.

    The squares of the parts are summed over the ranks that hold them, all tensors' at once: these ranks come here
    together. In float32, or float64 if one of them is.
    """
    kind = torch.float64 if any(one.dtype == torch.float64 for one in parts) else torch.float32
    found = torch.stack([torch.linalg.vector_norm(one, dtype=kind) for one in parts])
    cuts: dict[tuple[DeviceMesh, int], list[int]] = {}
    for index, one in enumerate(parameters):
        if not isinstance(one, DTensor):
            continue
        for dim, placement in enumerate(one.placements):
            if placement.is_shard():
                cuts.setdefault((one.device_mesh, dim), []).append(index)
    if not cuts:
        return found
    squares = found.square()
    for (mesh, dim), indices in cuts.items():
        chosen = torch.tensor(indices, device=squares.device)
        summed = squares[chosen]
        dist.all_reduce(summed, group=mesh.get_group(dim))
        squares[chosen] = summed
    return squares.sqrt()
