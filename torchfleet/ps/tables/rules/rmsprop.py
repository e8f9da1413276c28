"""RMSprop, centered or not, with momentum or without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.ps.kernels import dense_rules, sparse_rules
from torchfleet.ps.tables.rules.decay import decay_bounds, decays, ratio, velocity_bound
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule, expect


class RmsProp(RowRule):
    """torch.optim.RMSprop; the state is the mean square, the mean if centered, and the velocity with momentum.

    Lazy on rows: the means and the velocity of a row change in the updates that touch it.
    """

    num_states = 1
    squares = (0,)
    options: Mapping[str, float] = {"alpha": 0.99, "centered": 0.0}
    ranges: Mapping[str, tuple[float, float]] = {"alpha": (0.0, 1.0), "centered": (0.0, 1.0)}
    row_settings: Mapping[str, Any] = {"eps": 1e-8}
    optimizers = ("torch.optim.rmsprop.RMSprop",)
    torch_states = ("square_avg", "grad_avg", "momentum_buffer")

    def num_value_states(self, rule: Rule) -> int:
        return len(self.state_names(rule))

    def state_names(self, rule: Rule) -> tuple[str, ...]:
        is_kept = True, bool(rule.option("centered")), rule.momentum > 0
        return tuple(name for name, kept in zip(self.torch_states, is_kept, strict=True) if kept)

    def check(self, rule: Rule) -> None:
        expect(not rule.nesterov, "rmsprop has no rule.nesterov: leave it out")

    def refused_on_rows(self, rule: Rule) -> str:
        return ""

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        options = ("alpha", float(group["alpha"])), ("centered", float(bool(group["centered"])))
        return {**{name: group[name] for name in ("eps", "momentum", "weight_decay")}, "options": options}

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float] | None:
        grad, value = decay_bounds(rule, rate, grad, held[0])
        square, is_centered = max(held[1], grad * grad), bool(rule.option("centered"))
        scaled, new = ratio(rule, grad), 1.0 - rule.option("alpha")
        if not is_centered and new > 0:  # g is at most √(s / new), unless its square is so small that it counts as 0
            scaled = min(scaled, 2 / math.sqrt(new) + ratio(rule, 2.0**-75 / math.sqrt(new)))
        means = [max(held[2], grad)] if is_centered else []
        if not rule.momentum:
            return [value + 2 * rate * scaled, square, *means]
        velocity = velocity_bound(rule, held[-1], scaled)
        return None if velocity is None else [value + 2 * rate * velocity, square, *means, velocity]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        sparse_rules.rmsprop(store, *layout, at, grads, rate, *_settings(rule), rule.low, rule.high)

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        kept = dict(zip(self.state_names(rule), states, strict=True))
        arrays = [kept.get(name, weights) for name in self.torch_states]  # those that are not kept are not touched
        dense_rules.rmsprop(weights, *arrays, grads, rate, *_settings(rule), *decays(rule, rate))


def _settings(rule: Rule) -> tuple[float, float, bool, float]:
    return rule.option("alpha"), rule.eps, bool(rule.option("centered")), rule.momentum
