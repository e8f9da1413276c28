"""Lion."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.ps.worker.optim.checks import check_options
from torchfleet.ps.worker.optim.row_optimizer import RowOptimizer, State


class Lion(RowOptimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), with decoupled weight decay:
    w ← w - lr (sign(β1 m + (1 - β1) g) + weight_decay · w);  m ← β2 m + (1 - β2) g
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        check_options(self)

    def _first_state(self, group: dict[str, Any], parameter: torch.Tensor, has_rows: bool) -> State:
        return {"exp_avg": torch.zeros_like(parameter)}

    def _update(self, group: dict[str, Any], weight: torch.Tensor, grad: torch.Tensor, state: State) -> None:
        (beta1, beta2), mean = group["betas"], state["exp_avg"]
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        weight.sub_((beta1 * mean + (1.0 - beta1) * grad).sign(), alpha=group["lr"])
        mean.mul_(beta2).add_(grad, alpha=1.0 - beta2)
