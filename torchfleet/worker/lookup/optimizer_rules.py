"""From a torch optimizer's param group to the rule by which servers update a table."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.errors import ModelError
from torchfleet.tables.settings.spec import Rule

_REFUSED = ("maximize", "amsgrad", "differentiable", "capturable")


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The update rule of one param group; an error if servers do not have it."""
    for option in _REFUSED:
        if group.get(option):
            raise ModelError(f"{type(optimizer).__name__}({option}=True) is not supported on servers; leave it out")
    lr = float(group["lr"])
    if isinstance(optimizer, torch.optim.SGD):
        if group["dampening"]:
            raise ModelError(f"SGD(dampening={group['dampening']}) is not supported on servers; leave it 0")
        return Rule(
            "sgd", lr, momentum=group["momentum"], nesterov=group["nesterov"], weight_decay=group["weight_decay"]
        )
    if isinstance(optimizer, torch.optim.Adagrad):
        return Rule(
            "adagrad",
            lr,
            eps=group["eps"],
            lr_decay=group["lr_decay"],
            initial_accumulator=group["initial_accumulator_value"],
            weight_decay=group["weight_decay"],
        )
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam)):
        return _adam_rule(optimizer, group, lr)
    raise ModelError(
        f"{type(optimizer).__name__} cannot run on servers. Supported: torch.optim.SGD, Adagrad, Adam, AdamW, "
        "SparseAdam."
    )


def _adam_rule(optimizer: torch.optim.Optimizer, group: dict[str, Any], lr: float) -> Rule:
    beta1, beta2 = group["betas"]
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    decay = group.get("weight_decay", 0.0)
    return Rule("adam", lr, group["eps"], float(beta1), float(beta2), weight_decay=decay, decoupled_decay=decoupled)


def rule_text(rule: Rule) -> str:
    """A rule as users read it: its name, the options that are not zero, and the bounds of weights if there are any."""
    shown = {name: f"{getattr(rule, name):g}" for name in ("lr", "momentum", "weight_decay") if getattr(rule, name)}
    if rule.has_bounds:
        shown["bounds"] = f"({rule.low:g}, {rule.high:g})"
    return f"{rule.name}({', '.join(f'{name}={text}' for name, text in shown.items())})"
