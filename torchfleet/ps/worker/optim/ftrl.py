"""FTRL-Proximal."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.ps.worker.optim.checks import check_options
from torchfleet.ps.worker.optim.row_optimizer import RowOptimizer, State


class FTRL(RowOptimizer):
    """FTRL-Proximal with a rate of its own for every value: McMahan et al., "Ad Click Prediction" (2013), algorithm 1.

    With p = -lr_power and α = lr:
        σ = ((n + g²)^p - n^p) / α;  z ← z + g - σ w;  n ← n + g²
        w ← 0 where |z| ≤ l1, else -(z - sign(z) l1) / ((β + n^p) / α + l2)
    `l1` makes weights exactly zero. A step with lr=0 changes nothing. TensorFlow's l2_regularization_strength is half
    of `l2`; the paper's α, β, λ1 and λ2 are `lr`, `beta`, `l1` and `l2`.
    """

    def __init__(
        self,
        params: Any = None,
        lr: float = 0.05,
        l1: float = 0.0,
        l2: float = 0.0,
        beta: float = 1.0,
        lr_power: float = -0.5,
    ) -> None:
        super().__init__(params, {"lr": lr, "l1": l1, "l2": l2, "beta": beta, "lr_power": lr_power})
        check_options(self)

    def _first_state(self, group: dict[str, Any], parameter: torch.Tensor, has_rows: bool) -> State:
        return {"z": torch.zeros_like(parameter), "n": torch.zeros_like(parameter)}

    def _update(self, group: dict[str, Any], weight: torch.Tensor, grad: torch.Tensor, state: State) -> None:
        rate, power, (z, n) = group["lr"], -group["lr_power"], (state["z"], state["n"])
        if not rate:
            return
        before = n.pow(power)
        n.addcmul_(grad, grad)
        root = n.pow(power)
        z.add_(grad - (root - before) * weight / rate)
        over = (z.abs() - group["l1"]).clamp_min(0.0)
        weight.copy_(-z.sign() * over / ((group["beta"] + root) / rate + group["l2"]))
