"""From a torch optimizer's param group to the rule with which servers update a table."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.tables.settings.rule import MAX_FLOAT, RULES, Rule

_REFUSED = ("maximize", "amsgrad", "differentiable", "capturable")


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The update rule of one param group. Raises an error if servers do not implement it.

    An optimizer class that no rule names is treated as the class that it derives from.
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
        "have any optimizer that needs no closure: give the embeddings a param group of their own with a 'row_rule' "
        f"({', '.join(RULES)})."
    )


def row_rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The rule of a group's rows: the optimizer's own, or the one named by the group's "row_rule", with the group's
    "row_weight_decay" as weight decay; "row_decoupled_decay" decouples it from the gradients.
    """
    name = group.get("row_rule")
    if name is not None and name not in RULES:
        raise ModelError(f"a param group has row_rule={name!r}; expected one of {', '.join(RULES)}")
    rule = rule_of(optimizer, group) if name is None else Rule(name, 0.0, **RULES[name].row_settings)
    decay = group.get("row_weight_decay", rule.weight_decay)
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= MAX_FLOAT:
        raise ModelError(f"a param group has row_weight_decay={decay!r}; expected a number >= 0")
    is_decoupled = group.get("row_decoupled_decay", rule.decoupled_decay)
    if not isinstance(is_decoupled, bool):
        raise ModelError(f"a param group has row_decoupled_decay={is_decoupled!r}; expected True or False")
    changes = {"lr": float(group["lr"]), "weight_decay": float(decay), "decoupled_decay": is_decoupled}
    return msgspec.structs.replace(rule, **changes)


def needs_row_decay(rule: Rule, group: dict[str, Any], is_apart: bool) -> bool:
    """Whether rows need a separate setting, because the group's weight_decay, meant for every step, would act on them.

    AdamW decays by default and apart from the gradients: in a group of rows alone (`is_apart`), its decay acts on the
    rows that an update touches.
    """
    return has_plain_decay(rule, group) and not (is_apart and rule.decoupled_decay)


def has_plain_decay(rule: Rule, group: dict[str, Any]) -> bool:
    """Whether rows decay by the optimizer's weight_decay, without a row_weight_decay in their group."""
    return rule.weight_decay > 0 and "row_weight_decay" not in group


def kept_rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """The rule of a table that keeps what a torch optimizer updates elsewhere. Keeps only values if servers do not
    implement that optimizer, or do not know the names of its state.
    """
    try:
        rule = rule_of(optimizer, group)
    except ModelError:
        return Rule(lr=float(group["lr"]))
    is_known = rule.row_rule.num_dense_states(rule) == len(rule.row_rule.state_names(rule))
    return rule if is_known else Rule(lr=rule.lr)


def rule_text(rule: Rule) -> str:
    """A rule for display: its name, the nonzero options, and the bounds of weights if there are any."""
    shown = {name: f"{getattr(rule, name):g}" for name in ("lr", "momentum", "weight_decay") if getattr(rule, name)}
    shown |= {name: f"{value:g}" for name, value in rule.options}
    if rule.has_bounds:
        shown["bounds"] = f"({rule.low:g}, {rule.high:g})"
    return f"{rule.name}({', '.join(f'{name}={text}' for name, text in shown.items())})"
