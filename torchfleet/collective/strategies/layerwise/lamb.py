"""LAMB: Adam whose steps are, layer by layer, as long as the weights: for very large batches.

    m = β1 · m + (1 - β1) · g            m̂ = m / (1 - β1^t)
    v = β2 · v + (1 - β2) · g²           v̂ = v / (1 - β2^t)
    r = m̂ / (√v̂ + eps) + wd · p
    p = p - lr · (‖p‖ / ‖r‖) · r         the ratio is 1 where one of the norms is 0

Parameters whose names contain one of `exclude_from_weight_decay` have wd = 0 and keep the ratio, as in Paddle. Learning
rate, betas and eps are those of the user's torch.optim.Adam; its kernels (foreach, fused) are not used.

Source: You et al. 2019, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes. Composes with every
strategy but lars, dgc, localsgd and adaptive_localsgd; of parameters cut over ranks (sharding) the norm of the whole
is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchfleet.collective.local_tensors import local
from torchfleet.collective.strategies.layerwise.layerwise import (
    ReplacingOptimizer,
    check_inner,
    is_excluded,
    local_gradient,
    norms,
)
from torchfleet.collective.strategy import Strategy

_PLAIN = {
    "weight_decay": 0,
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": False,
}


class Lamb(Strategy):
    field = "lamb"

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        check_inner(self.field, inner, torch.optim.Adam, _PLAIN)
        excluded = is_excluded(names, self.settings.lamb_configs.exclude_from_weight_decay)
        return LambAdam(inner, self.settings.lamb_configs.lamb_weight_decay, excluded)


class LambAdam(ReplacingOptimizer):
    """The rule. State, as Adam's: exp_avg, exp_avg_sq, step."""

    def __init__(self, inner: torch.optim.Optimizer, decay: float, excluded: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(inner)
        self._decay, self._excluded = decay, excluded

    def step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        if not parameters:
            return
        weights = [local(parameter) for parameter in parameters]
        moves = self._adam(group, parameters)
        decayed = [index for index, parameter in enumerate(parameters) if not self._excluded(parameter)]
        if decayed and self._decay:
            torch._foreach_add_([moves[i] for i in decayed], [weights[i] for i in decayed], alpha=self._decay)
        rates = group["lr"] * _ratios(norms(weights, parameters), norms(moves, parameters))
        torch._foreach_mul_(moves, rates.unbind())
        torch._foreach_sub_(weights, moves)

    def _adam(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """m̂ / (√v̂ + eps) of this rank's shards, new tensors."""
        first_beta, second_beta = group["betas"]
        directions = [local_gradient(parameter) for parameter in parameters]
        means, squares = self.local_state(parameters, "exp_avg"), self.local_state(parameters, "exp_avg_sq")
        torch._foreach_lerp_(means, directions, 1 - first_beta)
        torch._foreach_mul_(squares, second_beta)
        torch._foreach_addcmul_(squares, directions, directions, value=1 - second_beta)
        steps = [self._count(parameter) for parameter in parameters]
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, [(1 - second_beta**step) ** 0.5 for step in steps])
        torch._foreach_add_(below, group["eps"])
        moves = torch._foreach_div(means, [1 - first_beta**step for step in steps])
        torch._foreach_div_(moves, below)
        return list(moves)

    def _count(self, parameter: torch.Tensor) -> int:
        """This parameter's steps, this one included; on the host, as Adam keeps them."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        return int(state["step"].item())


def _ratios(of_weights: torch.Tensor, of_moves: torch.Tensor) -> torch.Tensor:
    """‖p‖ / ‖r‖, or 1."""
    return torch.where((of_weights > 0) & (of_moves > 0), of_weights / of_moves, 1.0)
