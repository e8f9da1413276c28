"""Row-wise Adagrad, as FBGEMM and TorchRec have it."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.ps.worker.optim.checks import check_options
from torchfleet.ps.worker.optim.row_optimizer import RowOptimizer, State, with_decay


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum of squares per row: s ← s + mean(g²), w ← w - lr / (√s + eps) · g.

    The formula of FBGEMM's EXACT_ROWWISE_ADAGRAD. With `momentum`, scaled gradients go through a velocity:
    u ← μ u + g / (√s + eps), w ← w - lr u. `weight_decay` is added to the gradient, or with
    `decoupled_weight_decay` taken from the weight. Parameters with dense gradients have no rows: each of their values
    counts as a row, which is Adagrad.
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 0.01,
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "eps": eps,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, options)
        check_options(self)

    def _first_state(self, group: dict[str, Any], parameter: torch.Tensor, has_rows: bool) -> State:
        values = parameter[:, :1] if has_rows else parameter
        state = {"sum": torch.full_like(values, group["initial_accumulator_value"])}
        if group["momentum"]:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state

    def _update(self, group: dict[str, Any], weight: torch.Tensor, grad: torch.Tensor, state: State) -> None:
        grad = with_decay(group, weight, grad)
        square = grad.square()
        state["sum"] += square if state["sum"].shape == grad.shape else square.mean(1, keepdim=True)
        scale = state["sum"].sqrt() + group["eps"]
        if group["momentum"]:
            state["momentum_buffer"].mul_(group["momentum"]).add_(grad / scale)
            weight.sub_(state["momentum_buffer"], alpha=group["lr"])
        else:
            weight.sub_(group["lr"] / scale * grad)
