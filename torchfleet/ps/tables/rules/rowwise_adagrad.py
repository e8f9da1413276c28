"""Row-wise Adagrad: one sum of squares per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.ps.kernels import dense_rules, sparse_rules
from torchfleet.ps.tables.rules.decay import decay_bounds, decays, ratio, velocity_bound
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule, expect

_MOST_ROOT = 256.0  # the root of the largest dim, 2^16


class RowWiseAdagrad(RowRule):
    """FBGEMM's EXACT_ROWWISE_ADAGRAD: s ← s + mean(g²), w ← w - lr / (√s + eps) · g. The state is one s per row.

    A dense block has no rows: each of its values counts as one, which is Adagrad. With momentum, scaled gradients go
    through a velocity per value: u ← μ u + g / (√s + eps), w ← w - lr u.
    """

    num_states = 0
    squares = (-1,)
    row_settings: Mapping[str, Any] = {"eps": 1e-8}
    optimizers = ("torchfleet.ps.worker.optim.rowwise_adagrad.RowWiseAdagrad",)
    torch_states = ("momentum_buffer", "sum")
    counts_steps = False
    samples = ({}, {"momentum": 0.9})

    def num_value_states(self, rule: Rule) -> int:
        return 1 if rule.momentum else 0

    def num_row_states(self, rule: Rule) -> int:
        return 1

    def num_dense_states(self, rule: Rule) -> int:
        return 2 if rule.momentum else 1

    def state_names(self, rule: Rule) -> tuple[str, ...]:
        return self.torch_states if rule.momentum else self.torch_states[1:]

    def initial_state(self, rule: Rule) -> float:
        return rule.initial_accumulator

    def check(self, rule: Rule) -> None:
        is_known = not (rule.momentum and rule.initial_accumulator)
        expect(
            is_known, "rowwise_adagrad takes rule.momentum or rule.initial_accumulator; both are set: leave one at 0"
        )
        expect(not rule.nesterov, "rowwise_adagrad has no rule.nesterov: leave it out")

    def refused_on_rows(self, rule: Rule) -> str:
        return ""

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "eps": group["eps"],
            "momentum": group["momentum"],
            "initial_accumulator": group["initial_accumulator_value"],
            "weight_decay": group["weight_decay"],
            "decoupled_decay": bool(group["decoupled_weight_decay"]),
        }

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float] | None:
        grad, value = decay_bounds(rule, rate, grad, held[0])
        # g is at most √(dim · s), unless the mean of g² is so small that it counts as 0.
        scaled = min(ratio(rule, grad), 2 * _MOST_ROOT + ratio(rule, 2.0**-67))
        total = held[-1] + 2 * grad * grad
        if not rule.momentum:
            return [value + 2 * rate * scaled, total]
        velocity = velocity_bound(rule, held[1], scaled)
        return None if velocity is None else [value + 2 * rate * velocity, velocity, total]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        how = rule.eps, rule.momentum, rule.low, rule.high
        sparse_rules.rowwise_adagrad(store, *layout, at, grads, rate, *how)

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        if rule.momentum:
            how = rate, rule.eps, rule.momentum, *decays(rule, rate)
            dense_rules.scaled_momentum(weights, states[0], states[1], grads, *how)
        else:
            dense_rules.adagrad(weights, states[0], grads, rate, rule.eps, *decays(rule, rate))
