"""The optimizers that servers run on rows and on blocks. A new one is a class like these, and a line at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import dense_rules, rows
from torchfleet.ps.tables.settings.spec import MAX_FLOAT, RULES, Floats, RowRule, Rule


def learning_rate(rule: Rule, lr: float | None, step: int) -> float:
    """The rate of update number `step`, from the one given with the push, else from the table's own."""
    asked = rule.lr if lr is None else lr
    if not 0 <= asked <= MAX_FLOAT:
        raise TableError(f"a learning rate must be a finite float32 number >= 0, found {asked}")
    return rule.row_rule.rate(rule, asked, step)


def _decays(rule: Rule, rate: float) -> tuple[float, float]:
    """(what is added to a gradient per weight, what a weight is multiplied with): coupled and decoupled decay."""
    return (0.0, 1.0 - rate * rule.weight_decay) if rule.decoupled_decay else (rule.weight_decay, 1.0)


def decayed(rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float) -> Floats:
    """The gradients for the rows numbered `at`, with coupled weight decay in them; decoupled decay has been applied.

    Beside the rules: tables without decay, which are most, go the way that they have always gone.
    """
    if not rule.weight_decay:
        return grads
    decay, factor = _decays(rule, rate)
    if rule.decoupled_decay:
        rows.shrink(store, *layout, at, grads.shape[1], factor)
        return grads
    out = np.empty_like(grads)
    rows.add_decay(store, *layout, at, grads, decay, out)
    return out


_TINY = 1.2e-38  # float32 has fewer digits below it, or none


def _decay_bounds(rule: Rule, rate: float, grad: float, value: float) -> tuple[float, float]:
    """(bound on a gradient with its coupled decay, bound on a value after its decoupled decay)."""
    coupled, factor = _decays(rule, rate)
    value *= max(1.0, 1.000001 * abs(factor))
    return grad + coupled * value, value


def _ratio(rule: Rule, above: float) -> float:
    """`above` / (√s + eps) at most, whatever s is."""
    return above / rule.eps if rule.eps > _TINY else math.inf


class Sgd(RowRule):
    """torch.optim.SGD; momentum for blocks only."""

    num_states = 0

    def num_dense_states(self, rule: Rule) -> int:
        return 1 if rule.momentum else 0

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        grad, value = _decay_bounds(rule, rate, grad, held[0])
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
        decays = _decays(rule, rate)
        dense_rules.sgd(weights, velocity, grads, rate, rule.momentum, rule.nesterov, *decays, step)


class Adagrad(RowRule):
    """torch.optim.Adagrad, with its decay of the learning rate; the state is the sum of squares."""

    num_states = 1
    squares = (0,)

    def initial_state(self, rule: Rule) -> float:
        return rule.initial_accumulator

    def rate(self, rule: Rule, lr: float, step: int) -> float:
        return lr / (1 + (step - 1) * rule.lr_decay)

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        grad, value = _decay_bounds(rule, rate, grad, held[0])
        # g is at most √s, unless g² is so small that it counts as 0.
        ratio = min(_ratio(rule, grad), 2 + _ratio(rule, 2.0**-75))
        return [value + 2 * rate * max(grad, ratio), held[1] + 2 * grad * grad]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        rows.adagrad(store, *layout, at, grads, rate, rule.eps, rule.low, rule.high)

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        dense_rules.adagrad(weights, states[0], grads, rate, rule.eps, *_decays(rule, rate))


class Adam(RowRule):
    """torch.optim.Adam and AdamW on blocks, SparseAdam on rows; the state is the two moments."""

    num_states = 2
    squares = (1,)

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float]:
        grad, value = _decay_bounds(rule, rate, grad, held[0])
        mean, square = max(held[1], grad), max(held[2], grad * grad)
        rate /= 1.0 - rule.beta1**step  # which may be infinite itself: so it stands by itself below
        return [value + rate + 2 * rate * max(mean, _ratio(rule, mean)), mean, square]

    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        rows.adam(store, *layout, at, grads, rate, rule.beta1, rule.beta2, rule.eps, step, rule.low, rule.high)

    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        betas = rule.beta1, rule.beta2
        dense_rules.adam(weights, states[0], states[1], grads, rate, *betas, rule.eps, *_decays(rule, rate), step)


RULES["sgd"] = Sgd()
RULES["adagrad"] = Adagrad()
RULES["adam"] = Adam()
