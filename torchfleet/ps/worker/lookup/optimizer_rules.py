"""From a torch optimizer's param group to the rule by which servers update a table."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.tables.settings.rule import MAX_FLOAT, RULES, Rule

_REFUSED = ("maximize", "amsgrad", "differentiable", "capturable")


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The update rule of one param group; an error if servers do not have it.

    An optimizer is the one that it is derived from, where no rule names it itself.
    """
    for option in _REFUSED:
        if group.get(option):
            raise ModelError(f"{type(optimizer).__name__}({option}=True) is not supported on servers; leave it out")
    for name in (f"{base.__module__}.{base.__qualname__}" for base in type(optimizer).__mro__):
        for rule, row_rule in RULES.items():
            if name in row_rule.optimizers:
                return Rule(rule, float(group["lr"]), **row_rule.settings(name, group))
    supported = ", ".join(name.rpartition(".")[2] for row_rule in RULES.values() for name in row_rule.optimizers)
    raise ModelError(
        f"{type(optimizer).__name__} cannot run on servers. Supported: {supported}. In hybrid mode the network may "
        f"have any optimizer: give the embeddings a param group of their own with a 'row_rule' ({', '.join(RULES)})."
    )


def row_rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The rule of a group's rows: the optimizer's own, or the one that the group names as its "row_rule"; with the
    weight decay that it gives as its "row_weight_decay"."""
    name = group.get("row_rule")
    if name is not None and name not in RULES:
        raise ModelError(f"a param group has row_rule={name!r}; expected one of {', '.join(RULES)}")
    rule = rule_of(optimizer, group) if name is None else Rule(name, 0.0, **RULES[name].row_settings)
    decay = group.get("row_weight_decay", rule.weight_decay)
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= MAX_FLOAT:
        raise ModelError(f"a param group has row_weight_decay={decay!r}; expected a number >= 0")
    return msgspec.structs.replace(rule, lr=float(group["lr"]), weight_decay=float(decay))


def needs_row_decay(rule: Rule, group: dict[str, Any]) -> bool:
    """Whether a group's weight_decay, which acts at every step, would act on rows: they have one of their own."""
    return rule.weight_decay > 0 and "row_weight_decay" not in group


def kept_rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The rule of a table that keeps what an optimizer of torch does elsewhere: values alone, if servers do not have
    that optimizer, or do not know what it calls its state."""
    try:
        rule = rule_of(optimizer, group)
    except ModelError:
        return Rule(lr=float(group["lr"]))
    is_known = rule.row_rule.num_dense_states(rule) <= len(rule.row_rule.torch_states)
    return rule if is_known else Rule(lr=rule.lr)


def rule_text(rule: Rule) -> str:
    """A rule as users read it: its name, the options that are not zero, and the bounds of weights if there are any."""
    shown = {name: f"{getattr(rule, name):g}" for name in ("lr", "momentum", "weight_decay") if getattr(rule, name)}
    if rule.has_bounds:
        shown["bounds"] = f"({rule.low:g}, {rule.high:g})"
    return f"{rule.name}({', '.join(f'{name}={text}' for name, text in shown.items())})"
