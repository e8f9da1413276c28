"""Copies of models without what torchfleet has added to them."""

from __future__ import annotations

import copy
from typing import Any

import torch

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def copied(model: torch.nn.Module, replaced: dict[int, Any]) -> torch.nn.Module:
    """A copy of the model without torchfleet's hooks. `replaced`: by the id of an object, its replacement."""
    made: torch.nn.Module = copy.deepcopy(model, replaced)
    for part in made.modules():
        _drop_hooks(part)
    return made


def _drop_hooks(module: torch.nn.Module) -> None:
    """Remove torchfleet's hooks, which the copy inherited from the model."""
    for hooks in (getattr(module, name) for name in _HOOKS):
        for number, hook in list(hooks.items()):
            function = getattr(hook, "hook", hook)  # torch wraps some hooks
            if getattr(function, "__module__", "").startswith("torchfleet."):
                del hooks[number]
                for marks in (getattr(module, name) for name in _MARKS):
                    marks.pop(number, None)
