"""LAMB: Adam with steps scaled, layer by layer, to the norm of the weights, for very large batches.

    m = β1 · m + (1 - β1) · g            m̂ = m / (1 - β1^t)
    v = β2 · v + (1 - β2) · g²           v̂ = v / (1 - β2^t)
    r = m̂ / (√v̂ + eps) + wd · p
    p = p - lr · (‖p‖ / ‖r‖) · r         the ratio is 1 where one of the norms is 0

Norms, ratios and rates stay on the device. On a GPU with Triton a step is a few kernels (multi_tensor.py), elsewhere
torch's functions for lists of tensors.

Parameters whose names contain one of `exclude_from_weight_decay` have wd = 0 and keep the ratio, as in Paddle. Learning
rate, betas and eps are those of the user's torch.optim.Adam; its kernels (foreach, fused) are not used.

Source: You et al. 2019, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes. Composes with every
strategy except lars, dgc, localsgd and adaptive_localsgd; for parameters sharded over ranks (sharding) the norm is that
of the whole.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from torchfleet.collective.strategies.layerwise.layerwise import (
    LayerwiseStrategy,
    ReplacingOptimizer,
    check_inner,
)
from torchfleet.collective.tensors.local_tensors import shard
from torchfleet.collective.tensors.whole_norms import local_gradients, shard_norms, summed_over_ranks

_PLAIN = {
    "weight_decay": 0,
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": False,
}


class Lamb(LayerwiseStrategy):
    field = "lamb"

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        check_inner(self.field, inner, torch.optim.Adam, _PLAIN)
        configs = self.settings.lamb_configs
        return LambAdam(inner, configs.lamb_weight_decay, self.excluded(names))


class LambAdam(ReplacingOptimizer):
    """The LAMB update rule. State as in Adam: exp_avg, exp_avg_sq, step."""

    def __init__(self, inner: torch.optim.Optimizer, decay: float, excluded: set[int]) -> None:
        super().__init__(inner)
        self._decay, self._excluded = decay, excluded
        self._counts: dict[torch.Tensor, StepCounts] = {}  # by the first parameter of each part

    def step_part(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        weights = [shard(parameter) for parameter in parameters]
        directions = local_gradients(parameters)
        states = self.states(parameters, "exp_avg", "exp_avg_sq")
        means = [shard(state["exp_avg"]) for state in states]
        variances = [shard(state["exp_avg_sq"]) for state in states]
        counts = self._counts.setdefault(parameters[0], StepCounts())
        below = _below(group["betas"], counts.next(states))
        decays = self.decays(parameters, self._decay, self._excluded)
        launch = self._kernels.launch([weights, directions, means, variances])
        if launch is not None:
            launch.use(*below, decays)
            squares = launch.lamb_moments(group["betas"], group["eps"])
            launch.lamb_step(self._rates(group, squares, parameters), group["eps"])
            return
        moves = _adam(directions, means, variances, below, group)
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


class StepCounts:
    """Adam's step counts of some parameters, on the host. They are views of one tensor, which is incremented once."""

    def __init__(self) -> None:
        self._every, self._views = torch.empty(0), [torch.empty(0)]

    def next(self, states: list[dict[str, torch.Tensor]]) -> list[float]:
        """The step count of each, this step included."""
        if len(states) != len(self._views) or not all(map(is_, (s.get("step") for s in states), self._views)):
            self._every = torch.tensor([float(state.get("step", 0.0)) for state in states])  # at first, or after a load
            self._views = list(self._every.unbind())
            for state, view in zip(states, self._views, strict=True):
                state["step"] = view
        self._every += 1
        found: list[float] = self._every.tolist()
        return found


def _below(betas: tuple[float, float], steps: list[float]) -> tuple[list[float], list[float]]:
    """1 - β1^t and √(1 - β2^t) of each."""
    of_step = {step: (1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5) for step in set(steps)}
    return [of_step[step][0] for step in steps], [of_step[step][1] for step in steps]


def _adam(
    directions: list[torch.Tensor],
    means: list[torch.Tensor],
    variances: list[torch.Tensor],
    below: tuple[list[float], list[float]],
    group: dict[str, Any],
) -> list[torch.Tensor]:
    """m̂ / (√v̂ + eps) as new tensors; updates m and v."""
    first_beta, second_beta = group["betas"]
    torch._foreach_lerp_(means, directions, 1 - first_beta)
    torch._foreach_mul_(variances, second_beta)
    torch._foreach_addcmul_(variances, directions, directions, value=1 - second_beta)
    roots = torch._foreach_sqrt(variances)
    torch._foreach_div_(roots, below[1])
    torch._foreach_add_(roots, group["eps"])
    moves = torch._foreach_div(means, below[0])
    torch._foreach_div_(moves, roots)
    return list(moves)
