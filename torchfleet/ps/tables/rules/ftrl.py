"""FTRL-Proximal, which makes weights exactly zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.ps.kernels import dense_rules, sparse_rules
from torchfleet.ps.tables.settings.rule import Floats, RowRule, Rule, expect

_LARGEST = 1e30


class Ftrl(RowRule):
    """FTRL-Proximal of McMahan et al., "Ad Click Prediction: a View from the Trenches" (2013), with a rate of its own
    for every value; the state is z and n. kernels/rule_steps.py has the formula, `ftrl_step`.

    Numbers are clamped to -2^100 to 2^100, because a change of the rate may let z grow beyond any bound known before.
    """

    num_states = 2
    squares = (1,)
    options: Mapping[str, float] = {"l1": 0.0, "l2": 0.0, "beta": 1.0, "lr_power": -0.5}
    ranges: Mapping[str, tuple[float, float]] = {
        "l1": (0.0, _LARGEST),
        "l2": (0.0, _LARGEST),
        "beta": (1e-6, _LARGEST),
        "lr_power": (-1.0, 0.0),
    }
    optimizers = ("torchfleet.ps.worker.optim.ftrl.FTRL",)
    torch_states = ("z", "n")
    counts_steps = False

    def check(self, rule: Rule) -> None:
        expect(not rule.weight_decay, f"ftrl has no rule.weight_decay, found {rule.weight_decay}: set its option 'l2'")

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"options": tuple((name, float(group[name])) for name in self.options)}

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        return [max(bound, 2.0**100) for bound in held]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        sparse_rules.ftrl(store, *layout, at, grads, rate, *_settings(rule), rule.low, rule.high)

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        dense_rules.ftrl(weights, states[0], states[1], grads, rate, *_settings(rule))


def _settings(rule: Rule) -> tuple[float, float, float, float]:
    return rule.option("l1"), rule.option("l2"), rule.option("beta"), -rule.option("lr_power")
