"""Base of optimizers with a step size per layer (LARS, LAMB)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.closures import run_closure
from torchfleet.collective.module_names import parameters_named
from torchfleet.collective.strategies.layerwise.multi_tensor import MultiTensor, are_for_kernels
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.tensors.whole_norms import are_cut
from torchfleet.collective.world import World

_AT_ONCE = 1 << 26  # elements of whole tensors per part: a step needs two float32 of extra memory for each


def check_inner(
    field: str, inner: torch.optim.Optimizer, expected: type[torch.optim.Optimizer], settings: Mapping[str, Any]
) -> None:
    """Raise an error unless the user's optimizer is exactly of class `expected`, with these settings in every group."""
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
    """Raise an error unless every group of an SGD has momentum."""
    if any(not group["momentum"] > 0 for group in inner.param_groups):
        raise StrategyError(f"{field}=True needs torch.optim.SGD with momentum, found momentum=0: set it, 0.9 say")


class LayerwiseStrategy(Strategy):
    """A strategy whose `exclude_from_weight_decay` names parameters of the user's model."""

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._excluded: set[str] = set()

    def look_at(self, model: torch.nn.Module) -> None:
        entries = self.configs["exclude_from_weight_decay"]
        self._excluded = parameters_named(entries, model, f"{self.field}_configs['exclude_from_weight_decay']")

    def excluded(self, names: Mapping[torch.Tensor, str]) -> set[int]:
        """The ids of this rank's parameters that are excluded."""
        return {id(parameter) for parameter, name in names.items() if name in self._excluded}


class ReplacingOptimizer(torch.optim.Optimizer):
    """Steps in place of `inner` on the same groups, so that a scheduler of either changes both."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self._kernels = MultiTensor()
        self._decays: dict[tuple[int, ...], list[float]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        for group in self.param_groups:
            for part in _parts([parameter for parameter in group["params"] if parameter.grad is not None]):
                self.step_part(group, part)
        return loss

    def step_part(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """One step for some parameters of the group, all of which have gradients."""
        raise NotImplementedError

    def states(self, parameters: Sequence[torch.Tensor], *names: str) -> list[dict[str, torch.Tensor]]:
        """The state of each, with tensors of these names shaped like the parameter, initially 0."""
        found = [self.state[parameter] for parameter in parameters]
        for name in names:
            for place in [place for place, state in enumerate(found) if name not in state]:
                found[place][name] = torch.zeros_like(parameters[place], requires_grad=False)
        return found

    def decays(self, parameters: Sequence[torch.Tensor], decay: float, excluded: set[int]) -> list[float]:
        """The weight decay of each; 0 for those that are excluded. Returns the same list every time."""
        key = tuple(map(id, parameters))
        if key not in self._decays:
            self._decays[key] = [0.0 if each in excluded else decay for each in key]
        return self._decays[key]


def _parts(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split the parameters into parts; one part if kernels need no extra memory.

    Parts depend on the sizes of whole tensors: ranks with shards of the same tensors, which exchange norms, get the
    same parts.
    """
    if parameters and not are_cut(parameters) and are_for_kernels(parameters):
        yield parameters
        return
    part: list[torch.Tensor] = []
    num = 0
    for parameter in parameters:
        if part and num + parameter.numel() > _AT_ONCE:
            yield part
            part, num = [], 0
        part.append(parameter)
        num += parameter.numel()
    if part:
        yield part
