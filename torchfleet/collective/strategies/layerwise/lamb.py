"""LAMB: Adam whose steps are, layer by layer, as long as the weights: for very large batches.

    m = β1 · m + (1 - β1) · g            m̂ = m / (1 - β1^t)
    v = β2 · v + (1 - β2) · g²           v̂ = v / (1 - β2^t)
    r = m̂ / (√v̂ + eps) + wd · p
    p = p - lr · (‖p‖ / ‖r‖) · r         the ratio is 1 where one of the norms is 0

Norms, ratios and rates stay on the device. On a GPU with Triton a step is a few kernels (multi_tensor.py), elsewhere
torch's functions for lists of tensors.

Parameters whose names contain one of `exclude_from_weight_decay` have wd = 0 and keep the ratio, as in Paddle. Learning
rate, betas and eps are those of the user's torch.optim.Adam; its kernels (foreach, fused) are not used.

Source: You et al. 2019, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes. Composes with every
strategy but lars, dgc, localsgd and adaptive_localsgd; of parameters cut over ranks (sharding) the norm of the whole
is taken.
"""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.collective.strategies.layerwise.layerwise import (
    ReplacingOptimizer,
    check_inner,
    excluded,
)
from torchfleet.collective.strategies.layerwise.multi_tensor import Launch, is_fit
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.whole_norms import local_gradient, shard, shard_norms, summed_over_ranks

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
        configs = self.settings.lamb_configs
        return LambAdam(inner, configs.lamb_weight_decay, excluded(names, configs.exclude_from_weight_decay))


class LambAdam(ReplacingOptimizer):
    """The rule. State, as Adam's: exp_avg, exp_avg_sq, step."""

    def __init__(self, inner: torch.optim.Optimizer, decay: float, excluded: set[int]) -> None:
        super().__init__(inner)
        self._decay, self._excluded = decay, excluded

    def step_part(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        weights = [shard(parameter) for parameter in parameters]
        directions = [local_gradient(parameter) for parameter in parameters]
        states = self.states(parameters, "exp_avg", "exp_avg_sq")
        means = [shard(state["exp_avg"]) for state in states]
        variances = [shard(state["exp_avg_sq"]) for state in states]
        first_beta, second_beta = group["betas"]
        steps = _count(states)
        below_means = [1 - first_beta**step for step in steps]
        below_roots = [(1 - second_beta**step) ** 0.5 for step in steps]
        decays = [0.0 if id(parameter) in self._excluded else self._decay for parameter in parameters]
        rows = [weights, directions, means, variances]
        if is_fit(rows):
            launch = Launch(rows, [below_means, below_roots, decays], self._plans)
            squares = launch.lamb_moments(group["betas"], group["eps"])
            launch.lamb_step(self._rates(group, squares, parameters), group["eps"])
            return
        moves = _adam(directions, means, variances, below_means, below_roots, group)
        decayed = [place for place, decay in enumerate(decays) if decay]
        if decayed:
            torch._foreach_add_([moves[i] for i in decayed], [weights[i] for i in decayed], alpha=self._decay)
        squares = shard_norms([*weights, *moves]).square().view(2, -1)
        torch._foreach_mul_(moves, self._rates(group, squares, parameters).unbind())
        torch._foreach_sub_(weights, moves)

    def _rates(self, group: dict[str, Any], squares: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
        """lr · ‖p‖ / ‖r‖, or lr, from this rank's ‖p‖² and ‖r‖²."""
        of_weights, of_moves = summed_over_ranks(squares.flatten(), [*parameters, *parameters]).sqrt().view(2, -1)
        ratios = torch.where((of_weights > 0) & (of_moves > 0), of_weights / of_moves, 1.0)
        return group["lr"] * ratios  # type: ignore[no-any-return]


def _count(states: list[dict[str, torch.Tensor]]) -> list[int]:
    """Each one's steps, this one included; on the host, as Adam keeps them."""
    for state in states:
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
    counts = [state["step"] for state in states]
    torch._foreach_add_(counts, torch.tensor(1.0))  # a number would be made a tensor for each of them
    return [int(count) for count in torch.stack(counts).tolist()]


def _adam(
    directions: list[torch.Tensor],
    means: list[torch.Tensor],
    variances: list[torch.Tensor],
    below_means: list[float],
    below_roots: list[float],
    group: dict[str, Any],
) -> list[torch.Tensor]:
    """m̂ / (√v̂ + eps), new tensors; m and v are brought up to date."""
    first_beta, second_beta = group["betas"]
    torch._foreach_lerp_(means, directions, 1 - first_beta)
    torch._foreach_mul_(variances, second_beta)
    torch._foreach_addcmul_(variances, directions, directions, value=1 - second_beta)
    below = torch._foreach_sqrt(variances)
    torch._foreach_div_(below, below_roots)
    torch._foreach_add_(below, group["eps"])
    moves = torch._foreach_div(means, below_means)
    torch._foreach_div_(moves, below)
    return list(moves)
