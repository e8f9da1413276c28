"""The rules of tables on devices, in plain torch: the formulas of kernels/rows.py and kernels/sparse_rules.py."""

from __future__ import annotations

import math

import torch

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.rule import Rule

RULES_ON_DEVICES = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def check_rule(rule: Rule, table: str) -> None:
    """Raise TableError if tables on devices do not implement this rule."""
    if rule.name not in RULES_ON_DEVICES or rule.momentum:
        found = f"'{rule.name}'" + (f" with momentum={rule.momentum:g}" if rule.momentum else "")
        raise TableError(
            f"table '{table}': a table on a device has the rules {', '.join(RULES_ON_DEVICES)}, without momentum; "
            f"found {found}. Use one of them, or leave out device= to have the rows on servers."
        )


def step_rate(rule: Rule, lr: float, step: int) -> float:
    """The factor of update number `step` (1, 2, ...): the rule's rate, for Adam with the corrections of its moments."""
    rate = rule.row_rule.rate(rule, lr, step)
    if rule.name == "adam":
        rate *= math.sqrt(1.0 - rule.beta2**step) / (1.0 - rule.beta1**step)
    return rate


def updated(rule: Rule, dim: int, words: torch.Tensor, grads: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Rows [value | state] after one gradient each. `rates`: (step_rate, factor of the values by decoupled decay)."""
    value, rate = words[:, :dim], rates[0]
    if rule.weight_decay:
        if rule.decoupled_decay:
            value = value * rates[1]
        else:
            grads = grads + value * rule.weight_decay
    if rule.name == "sgd":
        state = words[:, dim:]
        value = value - rate * grads
    elif rule.name == "adagrad":
        state = words[:, dim:] + grads * grads
        value = value - rate * (grads / (state.sqrt() + rule.eps))
    elif rule.name == "rowwise_adagrad":
        state = words[:, dim:] + (grads * grads).sum(1, keepdim=True) / dim
        value = value - (rate / (state.sqrt() + rule.eps)) * grads
    else:
        mean, square = words[:, dim : 2 * dim], words[:, 2 * dim :]
        mean = mean + (grads - mean) * (1.0 - rule.beta1)
        square = square + (grads * grads - square) * (1.0 - rule.beta2)
        state = torch.cat([mean, square], 1)
        value = value - rate * (mean / (square.sqrt() + rule.eps))
    if rule.has_bounds:
        value = value.clamp(rule.low, rule.high)
    return torch.cat([value, state], 1)
