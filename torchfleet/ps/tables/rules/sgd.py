"""SGD, with momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.ps.kernels import dense_rules, rows, sparse_rules, table_groups
from torchfleet.ps.tables.rules.decay import decay_bounds, decays, velocity_bound
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule


class Sgd(RowRule):
    """torch.optim.SGD; with momentum, the state is the velocity.

    Momentum on rows is lazy: the velocity of a row changes in the updates that touch the row, as if the steps between
    them had not been made.
    """

    num_states = 0
    options: Mapping[str, float] = {"dampening": 0.0}
    ranges: Mapping[str, tuple[float, float]] = {"dampening": (0.0, 1.0)}
    optimizers = ("torch.optim.sgd.SGD",)
    torch_states = ("momentum_buffer",)
    counts_steps = False
    is_linear = True
    samples = ({}, {"momentum": 0.9})

    def num_value_states(self, rule: Rule) -> int:
        return 1 if rule.momentum else 0

    def initial_state(self, rule: Rule) -> float:
        # -0.0 marks the velocity of a row that was never updated, whose first gradient is not dampened
        return -0.0 if rule.option("dampening") else 0.0

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        dampening = float(group["dampening"])
        options = (("dampening", dampening),) if dampening and group["momentum"] else ()
        return {**{name: group[name] for name in ("momentum", "nesterov", "weight_decay")}, "options": options}

    def refused_on_rows(self, rule: Rule) -> str:
        return ""

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float] | None:
        grad, value = decay_bounds(rule, rate, grad, held[0])
        if not rule.momentum:
            return [value + 2 * rate * grad]
        velocity = velocity_bound(rule, held[1], grad)
        if velocity is None:
            return None
        return [value + 2 * rate * (grad + velocity if rule.nesterov else velocity), velocity]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        if rule.momentum:
            how = rule.momentum, rule.option("dampening"), rule.nesterov
            sparse_rules.momentum_sgd(store, *layout, at, grads, rate, *how, rule.low, rule.high)
        else:
            rows.sgd(store, *layout, at, grads, rate, rule.low, rule.high)

    def group_kernel(self, rule: Rule) -> int | None:
        return None if rule.momentum else table_groups.SGD

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        velocity = states[0] if len(states) else weights
        how = rule.momentum, rule.option("dampening"), rule.nesterov
        dense_rules.sgd(weights, velocity, grads, rate, *how, *decays(rule, rate), step)
