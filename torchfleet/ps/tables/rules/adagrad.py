"""Adagrad, with its decay of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.ps.kernels import dense_rules, rows, table_groups
from torchfleet.ps.tables.rules.decay import decay_bounds, decays, ratio
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule


class Adagrad(RowRule):
    """torch.optim.Adagrad; the state is the sum of squares."""

    num_states = 1
    squares = (0,)
    row_settings: Mapping[str, Any] = {"eps": 1e-10}
    optimizers = ("torch.optim.adagrad.Adagrad",)
    torch_states = ("sum",)

    def initial_state(self, rule: Rule) -> float:
        return rule.initial_accumulator

    def rate(self, rule: Rule, lr: float, step: int) -> float:
        return lr / (1 + (step - 1) * rule.lr_decay)

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "eps": group["eps"],
            "lr_decay": group["lr_decay"],
            "initial_accumulator": group["initial_accumulator_value"],
            "weight_decay": group["weight_decay"],
        }

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        grad, value = decay_bounds(rule, rate, grad, held[0])
        # g is at most √s, unless g² is so small that it counts as 0.
        most = min(ratio(rule, grad), 2 + ratio(rule, 2.0**-75))
        return [value + 2 * rate * max(grad, most), held[1] + 2 * grad * grad]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        rows.adagrad(store, *layout, at, grads, rate, rule.eps, rule.low, rule.high)

    def group_kernel(self, rule: Rule) -> int | None:
        return table_groups.ADAGRAD

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        dense_rules.adagrad(weights, states[0], grads, rate, rule.eps, *decays(rule, rate))
