"""SGD, with momentum on blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.base.errors import ModelError
from torchfleet.ps.kernels import dense_rules, rows
from torchfleet.ps.tables.rules.decay import decay_bounds, decays
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule


class Sgd(RowRule):
    """torch.optim.SGD; momentum for blocks only."""

    num_states = 0
    optimizers = ("torch.optim.sgd.SGD",)
    torch_states = ("momentum_buffer",)
    counts_steps = False
    is_linear = True

    def num_dense_states(self, rule: Rule) -> int:
        return 1 if rule.momentum else 0

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        if group["dampening"]:
            raise ModelError(f"SGD(dampening={group['dampening']}) is not supported on servers; leave it 0")
        return {name: group[name] for name in ("momentum", "nesterov", "weight_decay")}

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        grad, value = decay_bounds(rule, rate, grad, held[0])
        velocities = [1.000001 * (rule.momentum * velocity + grad) for velocity in held[1:]]
        step_by = grad + rule.momentum * velocities[0] if velocities and rule.nesterov else [grad, *velocities][-1]
        return [value + 2 * rate * step_by, *velocities]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        rows.sgd(store, *layout, at, grads, rate, rule.low, rule.high)

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        velocity = states[0] if len(states) else weights
        dense_rules.sgd(weights, velocity, grads, rate, rule.momentum, rule.nesterov, *decays(rule, rate), step)
