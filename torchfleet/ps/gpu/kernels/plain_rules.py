"""The rules of tables on devices, in plain torch: the formulas of kernels/rows.py, kernels/sparse_rules.py and
kernels/rule_steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.rule import Rule

Row = tuple[torch.Tensor, torch.Tensor]  # values, state
_MOST = 2.0**100  # as in kernels/rule_steps.py


def check_rule(rule: Rule, table: str) -> None:
    """Raise TableError if tables on devices do not implement this rule."""
    if rule.name not in _FORMULAS:
        raise TableError(
            f"table '{table}': a table on a device has the rules {', '.join(_FORMULAS)}; found '{rule.name}'. Use one "
            "of them, or leave out device= to have the rows on servers."
        )


def step_rate(rule: Rule, lr: float, step: int) -> float:
    """The factor of update number `step` (1, 2, ...): the rule's rate, for Adam with the corrections of its moments."""
    rate = rule.row_rule.rate(rule, lr, step)
    if rule.name == "adam":
        rate *= math.sqrt(1.0 - rule.beta2**step) / (1.0 - rule.beta1**step)
    return rate


def updated(rule: Rule, dim: int, words: torch.Tensor, grads: torch.Tensor, rate: float, factor: float) -> torch.Tensor:
    """Rows [value | state] after one gradient each, by a `step_rate`. `factor`: of the values, by decoupled decay."""
    if rule.name == "ftrl" and not rate:
        return words
    value = words[:, :dim]
    if rule.weight_decay:
        if rule.decoupled_decay:
            value = value * factor
        else:
            grads = grads + value * rule.weight_decay
    value, state = _FORMULAS[rule.name](rule, (value, words[:, dim:]), grads, rate)
    if rule.has_bounds:
        value = value.clamp(rule.low, rule.high)
    return torch.cat([value, state], 1)


def _sgd(rule: Rule, row: Row, grads: torch.Tensor, rate: float) -> Row:
    value, velocity = row
    if not rule.momentum:
        return value - rate * grads, velocity
    is_new = (velocity == 0) & velocity.signbit()  # -0.0: the row was never updated
    velocity = rule.momentum * velocity + (1.0 - rule.option("dampening")) * grads
    velocity = torch.where(is_new, grads, velocity) + 0.0
    return value - rate * (grads + rule.momentum * velocity if rule.nesterov else velocity), velocity


def _adagrad(rule: Rule, row: Row, grads: torch.Tensor, rate: float) -> Row:
    total = row[1] + grads * grads
    return row[0] - rate * (grads / (total.sqrt() + rule.eps)), total


def _rowwise_adagrad(rule: Rule, row: Row, grads: torch.Tensor, rate: float) -> Row:
    value, state = row
    total = state[:, -1:] + (grads * grads).sum(1, keepdim=True) / grads.shape[1]
    scale = total.sqrt() + rule.eps
    if not rule.momentum:
        return value - (rate / scale) * grads, total
    velocity = rule.momentum * state[:, :-1] + grads / scale
    return value - rate * velocity, torch.cat([velocity, total], 1)


def _adam(rule: Rule, row: Row, grads: torch.Tensor, rate: float) -> Row:
    mean, square = row[1].chunk(2, 1)
    mean = mean + (grads - mean) * (1.0 - rule.beta1)
    square = square + (grads * grads - square) * (1.0 - rule.beta2)
    return row[0] - rate * (mean / (square.sqrt() + rule.eps)), torch.cat([mean, square], 1)


def _rmsprop(rule: Rule, row: Row, grads: torch.Tensor, rate: float) -> Row:
    square, *others = row[1].chunk(row[1].shape[1] // grads.shape[1], 1)
    alpha = rule.option("alpha")
    square = alpha * square + (1.0 - alpha) * (grads * grads)
    spread = square
    if rule.option("centered"):
        others[0] = others[0] + (1.0 - alpha) * (grads - others[0])
        spread = (square - others[0] * others[0]).clamp(min=0.0)
    step = grads / (spread.sqrt() + rule.eps)
    if rule.momentum:
        others[-1] = step = rule.momentum * others[-1] + step
    return row[0] - rate * step, torch.cat([square, *others], 1)


def _lion(rule: Rule, row: Row, grads: torch.Tensor, rate: float) -> Row:
    value, mean = row
    side = rule.beta1 * mean + (1.0 - rule.beta1) * grads
    return value - rate * side.sign(), rule.beta2 * mean + (1.0 - rule.beta2) * grads


def _ftrl(rule: Rule, row: Row, grads: torch.Tensor, rate: float) -> Row:
    z, n = row[1].chunk(2, 1)
    total, power = (n + grads * grads).clamp(max=_MOST), -rule.option("lr_power")
    before, root = (n.sqrt(), total.sqrt()) if power == 0.5 else (n**power, total**power)
    z = (z + (grads - (root - before) * row[0] / rate)).clamp(-_MOST, _MOST)
    over = z.abs() - rule.option("l1")
    size = (over / ((rule.option("beta") + root) / rate + rule.option("l2"))).clamp(max=_MOST)
    return torch.where(over <= 0, 0.0, torch.where(z > 0, -size, size)), torch.cat([z, total], 1)


_FORMULAS: dict[str, Callable[[Rule, Row, torch.Tensor, float], Row]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "rmsprop": _rmsprop,
    "lion": _lion,
    "ftrl": _ftrl,
}
