"""LARS: momentum SGD whose step size follows, layer by layer, how large the weights are beside their gradients.

    local_lr = lr · coeff · ‖p‖ / (‖g‖ + wd · ‖p‖ + eps)      where ‖p‖ > 0 and ‖g‖ > 0; else lr
    v = momentum · v + local_lr · (g + wd · p)
    p = p - v

Parameters whose names contain one of `exclude_from_weight_decay` (biases and norms, as a rule) have wd = 0 and
local_lr = lr: for them, as in Paddle, it is plain momentum SGD. `lars_weight_decay` = 0 leaves the scaling on.
Learning rate and momentum are those of the user's torch.optim.SGD; its kernels (foreach, fused) are not used.

Source: You, Gitman, Ginsburg 2017, Large Batch Training of Convolutional Networks. Composes with every strategy but
lamb, dgc, localsgd and adaptive_localsgd; of parameters cut over ranks (sharding) the norm of the whole is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchfleet.collective.local_tensors import local
from torchfleet.collective.strategies.layerwise.layerwise import (
    ReplacingOptimizer,
    check_inner,
    check_momentum,
    is_excluded,
    local_gradient,
    norms,
)
from torchfleet.collective.strategy import Strategy
from torchfleet.errors import StrategyError
from torchfleet.strategy.collective_fields import LarsConfigs

Pushes = list[torch.Tensor] | tuple[torch.Tensor, ...]
_PLAIN = {"nesterov": False, "dampening": 0, "weight_decay": 0, "maximize": False, "differentiable": False}


class Lars(Strategy):
    field = "lars"

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        check_inner(self.field, inner, torch.optim.SGD, _PLAIN)
        check_momentum(self.field, inner)
        if inner.state:
            raise StrategyError(
                "lars=True: the optimizer has made steps already, and SGD's momentum means something else than that of "
                "LARS. Make a new torch.optim.SGD."
            )
        configs = self.settings.lars_configs
        return LarsMomentum(inner, configs, is_excluded(names, configs.exclude_from_weight_decay))


class LarsMomentum(ReplacingOptimizer):
    """The rule. State: momentum_buffer, the v above."""

    def __init__(
        self, inner: torch.optim.Optimizer, configs: LarsConfigs, excluded: Callable[[torch.Tensor], bool]
    ) -> None:
        super().__init__(inner)
        self._coeff, self._decay, self._epsilon = configs.lars_coeff, configs.lars_weight_decay, configs.epsilon
        self._excluded = excluded

    def step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        scaled = [parameter for parameter in parameters if not self._excluded(parameter)]
        if scaled:
            weights = [local(parameter) for parameter in scaled]
            directions = [local_gradient(parameter) for parameter in scaled]
            rates = self._rates(group["lr"], norms(weights, scaled), norms(directions, scaled))
            pushes = torch._foreach_add(directions, weights, alpha=self._decay)
            torch._foreach_mul_(pushes, rates.unbind())
            self._move(group, scaled, pushes)
        plain = [parameter for parameter in parameters if self._excluded(parameter)]
        if plain:
            self._move(group, plain, [local_gradient(parameter) * group["lr"] for parameter in plain])

    def _rates(self, lr: Any, of_weights: torch.Tensor, of_gradients: torch.Tensor) -> torch.Tensor:
        """Each one's local_lr, on the device, from the norms."""
        rates = lr * self._coeff * of_weights / (of_gradients + self._decay * of_weights + self._epsilon)
        return torch.where((of_weights > 0) & (of_gradients > 0), rates, lr)

    def _move(self, group: dict[str, Any], parameters: list[torch.Tensor], pushes: Pushes) -> None:
        velocities = self.local_state(parameters, "momentum_buffer")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, pushes)
        torch._foreach_sub_([local(parameter) for parameter in parameters], velocities)
