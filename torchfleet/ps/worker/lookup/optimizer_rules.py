"""From a torch optimizer's param group to the rule by which servers update a table."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.tables.settings.spec import MAX_FLOAT, Rule

# With the other options of torch's optimizers of these names as they are by default.
ROW_RULES = {
    "sgd": Rule("sgd", 0.0),
    "adagrad": Rule("adagrad", 0.0, eps=1e-10),
    "adam": Rule("adam", 0.0, 1e-8, 0.9, 0.999),
}
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
        "SparseAdam. In hybrid mode the network may have any optimizer: give the embeddings a param group of their own "
        "with 'row_rule': 'adagrad' (or sgd, adam)."
    )


def row_rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The rule of a group's rows: the optimizer's own, or the one that the group names as its "row_rule"; with the
    weight decay that it gives as its "row_weight_decay"."""
    name = group.get("row_rule")
    if name is not None and name not in ROW_RULES:
        raise ModelError(f"a param group has row_rule={name!r}; expected one of {', '.join(ROW_RULES)}")
    rule = rule_of(optimizer, group) if name is None else ROW_RULES[name]
    decay = group.get("row_weight_decay", rule.weight_decay)
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= MAX_FLOAT:
        raise ModelError(f"a param group has row_weight_decay={decay!r}; expected a number >= 0")
    return msgspec.structs.replace(rule, lr=float(group["lr"]), weight_decay=float(decay))


def needs_row_decay(rule: Rule, group: dict[str, Any]) -> bool:
    """Whether a group's weight_decay, which acts at every step, would act on rows: they have one of their own."""
    return rule.weight_decay > 0 and "row_weight_decay" not in group


def kept_rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The rule of a table that keeps what an optimizer of torch does elsewhere: values alone, if servers do not have
    that optimizer."""
    try:
        return rule_of(optimizer, group)
    except ModelError:
        return Rule("sgd", float(group["lr"]))


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
