"""Adam and AdamW on blocks, SparseAdam on rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.ps.kernels import dense_rules, rows, table_groups
from torchfleet.ps.tables.rules.decay import decay_bounds, decays, ratio
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule

_ADAM_W = "torch.optim.adamw.AdamW"


class Adam(RowRule):
    """torch.optim.Adam and AdamW on blocks, SparseAdam on rows; the state is the two moments."""

    num_states = 2
    squares = (1,)
    row_settings: Mapping[str, Any] = {"eps": 1e-8, "beta1": 0.9, "beta2": 0.999}
    optimizers = ("torch.optim.adam.Adam", _ADAM_W, "torch.optim.sparse_adam.SparseAdam")
    torch_states = ("exp_avg", "exp_avg_sq")

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "eps": group["eps"],
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": group.get("weight_decay", 0.0),
            "decoupled_decay": optimizer == _ADAM_W or bool(group.get("decoupled_weight_decay")),
        }

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        grad, value = decay_bounds(rule, rate, grad, held[0])
        mean, square = max(held[1], grad), max(held[2], grad * grad)
        rate /= 1.0 - rule.beta1**step  # may itself be infinite, so it is computed separately from the product below
        return [value + rate + 2 * rate * max(mean, ratio(rule, mean)), mean, square]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        rows.adam(store, *layout, at, grads, rate, rule.beta1, rule.beta2, rule.eps, step, rule.low, rule.high)

    def group_kernel(self, rule: Rule) -> int | None:
        return table_groups.ADAM

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        betas = rule.beta1, rule.beta2
        dense_rules.adam(weights, states[0], states[1], grads, rate, *betas, rule.eps, *decays(rule, rate), step)
