"""Lion: steps by the sign of a mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.ps.kernels import dense_rules, sparse_rules
from torchfleet.ps.tables.rules.decay import decay_bounds, decays
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule


class Lion(RowRule):
    """Lion of Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), with decoupled weight decay; the
    state is the mean m: w ← w - lr (sign(β1 m + (1 - β1) g) + λ w), then m ← β2 m + (1 - β2) g.
    """

    num_states = 1
    row_settings: Mapping[str, Any] = {"beta1": 0.9, "beta2": 0.99, "decoupled_decay": True}
    optimizers = ("torchfleet.ps.worker.optim.lion.Lion",)
    torch_states = ("exp_avg",)
    counts_steps = False

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = map(float, group["betas"])
        return {"beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"], "decoupled_decay": True}

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        grad, value = decay_bounds(rule, rate, grad, held[0])
        return [value + 2 * rate, max(held[1], grad)]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        sparse_rules.lion(store, *layout, at, grads, rate, rule.beta1, rule.beta2, rule.low, rule.high)

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        dense_rules.lion(weights, states[0], grads, rate, rule.beta1, rule.beta2, *decays(rule, rate))
