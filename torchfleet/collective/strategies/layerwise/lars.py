"""LARS: momentum SGD whose step size follows, layer by layer, the ratio of the norms of weights and gradients.

    local_lr = lr · coeff · ‖p‖ / (‖g‖ + wd · ‖p‖ + eps)      where ‖p‖ > 0 and ‖g‖ > 0; else lr
    v = momentum · v + local_lr · (g + wd · p)
    p = p - v

Parameters whose names contain one of `exclude_from_weight_decay` (biases and norms, as a rule) have wd = 0 and
local_lr = lr: for them, as in Paddle, it is plain momentum SGD. `lars_weight_decay` = 0 leaves the scaling on.
Learning rate and momentum are those of the user's torch.optim.SGD; its kernels (foreach, fused) are not used.

Norms and rates stay on the device. On a GPU with Triton a step is a few kernels (multi_tensor.py), elsewhere torch's
functions for lists of tensors.

Source: You, Gitman, Ginsburg 2017, Large Batch Training of Convolutional Networks. Composes with every strategy but
lamb, dgc, localsgd and adaptive_localsgd; for parameters sharded over ranks (sharding) the norm is that of the whole.
"""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.collective_fields import LarsConfigs
from torchfleet.collective.strategies.layerwise.layerwise import (
    LayerwiseStrategy,
    ReplacingOptimizer,
    check_inner,
    check_momentum,
)
from torchfleet.collective.tensors.local_tensors import shard
from torchfleet.collective.tensors.whole_norms import local_gradients, shard_norms, summed_over_ranks

_PLAIN = {"nesterov": False, "dampening": 0, "weight_decay": 0, "maximize": False, "differentiable": False}


class Lars(LayerwiseStrategy):
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
        return LarsMomentum(inner, configs, self.excluded(names))


class LarsMomentum(ReplacingOptimizer):
    """The LARS update rule. State: momentum_buffer, the v above."""

    def __init__(self, inner: torch.optim.Optimizer, configs: LarsConfigs, excluded: set[int]) -> None:
        super().__init__(inner)
        self._coeff, self._decay, self._epsilon = configs.lars_coeff, configs.lars_weight_decay, configs.epsilon
        self._excluded = excluded
        self._flags: dict[Any, torch.Tensor] = {}

    def step_part(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        weights = [shard(parameter) for parameter in parameters]
        directions = local_gradients(parameters)
        velocities = [shard(state["momentum_buffer"]) for state in self.states(parameters, "momentum_buffer")]
        decays = self.decays(parameters, self._decay, self._excluded)
        launch = self._kernels.launch([weights, directions, velocities])
        if launch is not None:
            launch.use(decays)
            launch.lars_step(self._rates(group, launch.lars_squares(), parameters), group["momentum"])
            return
        squares = shard_norms([*weights, *directions]).square().view(2, -1)
        pushes = torch._foreach_mul(weights, decays)
        torch._foreach_add_(pushes, directions)
        torch._foreach_mul_(pushes, self._rates(group, squares, parameters).unbind())
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, pushes)
        torch._foreach_sub_(weights, velocities)

    def _rates(self, group: dict[str, Any], squares: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
        """The local_lr of each, from this rank's ‖p‖² and ‖g‖²; lr for those that are excluded."""
        of_weights, of_gradients = summed_over_ranks(squares.flatten(), [*parameters, *parameters]).sqrt().view(2, -1)
        rates = group["lr"] * self._coeff * of_weights / (of_gradients + self._decay * of_weights + self._epsilon)
        is_scaled = (of_weights > 0) & (of_gradients > 0) & self._scaled(parameters, rates.device)
        return torch.where(is_scaled, rates, group["lr"])

    def _scaled(self, parameters: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Which parameters are not excluded; on the device, uploaded once."""
        key = (device, *map(id, parameters))
        if key not in self._flags:
            self._flags[key] = torch.tensor([each not in self._excluded for each in key[1:]], device=device)
        return self._flags[key]
