"""Row optimizers: how much state a rule keeps behind a value, and the kernel that applies it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.errors import TableError
from torchfleet.kernels import dense_rules, rows
from torchfleet.tables.settings.spec import MAX_FLOAT, Rule

Floats = npt.NDArray[np.float32]

_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}


def num_states(rule: Rule) -> int:
    """State numbers per value number of a sparse row."""
    return _STATES[rule.name]


def num_dense_states(rule: Rule) -> int:
    return 1 if rule.name == "sgd" and rule.momentum else _STATES[rule.name]


def learning_rate(rule: Rule, lr: float | None, step: int) -> float:
    """The rate of update number `step`: the one given with the push, else the table's own."""
    rate = rule.lr if lr is None else lr
    if not 0 <= rate <= MAX_FLOAT:
        raise TableError(f"a learning rate must be a finite float32 number >= 0, found {rate}")
    return rate / (1 + (step - 1) * rule.lr_decay) if rule.name == "adagrad" else rate


def apply_to_rows(
    rule: Rule, store: Any, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
) -> None:
    """Update the rows numbered `at`, all different; layout is (width, offset) of the store."""
    if rule.name == "sgd":
        rows.sgd(store, *layout, at, grads, rate, rule.low, rule.high)
    elif rule.name == "adagrad":
        rows.adagrad(store, *layout, at, grads, rate, rule.eps, rule.low, rule.high)
    else:
        rows.adam(store, *layout, at, grads, rate, rule.beta1, rule.beta2, rule.eps, step, rule.low, rule.high)


def apply_to_block(rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int) -> None:
    """Update a flat block; states has one row of len(weights) per state number."""
    decay = 0.0 if rule.decoupled_decay else rule.weight_decay
    shrink = 1.0 - rate * rule.weight_decay if rule.decoupled_decay else 1.0
    if rule.name == "sgd":
        velocity = states[0] if len(states) else weights
        dense_rules.sgd(weights, velocity, grads, rate, rule.momentum, rule.nesterov, decay, shrink, step)
    elif rule.name == "adagrad":
        dense_rules.adagrad(weights, states[0], grads, rate, rule.eps, decay, shrink)
    else:
        dense_rules.adam(
            weights, states[0], states[1], grads, rate, rule.beta1, rule.beta2, rule.eps, decay, shrink, step
        )
