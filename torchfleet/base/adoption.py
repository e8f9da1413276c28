"""An optimizer that replaces the user's. It shares the user's param groups, state and hooks, and has its own `step`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchfleet.base.errors import FleetError
from torchfleet.base.paddle_names import OPTIMIZER, WithPaddleNames

# Hooks of all optimizers of the process: torch.optim.optimizer.register_optimizer_step_pre_hook and ..._post_hook.
_GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of its param groups."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Set what `options_of` has returned, in place. Raises FleetError for another number of groups."""
    if len(options) != len(optimizer.param_groups):
        raise FleetError(
            f"expected the options of {len(optimizer.param_groups)} param groups, found {len(options)}: the optimizer "
            "is not the one that was saved"
        )
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


class AdoptedOptimizer(WithPaddleNames, torch.optim.Optimizer):
    """Replaces the user's optimizer and shares its param groups, so a scheduler made for either works on both.

    This optimizer calls the step hooks of the user's optimizer, once per step. Subclasses implement `step`, which
    begins with `_begin_step`.
    """

    _PADDLE_NAMES = OPTIMIZER

    def __init__(self, user: torch.optim.Optimizer) -> None:
        # All but `step`: an existing scheduler has wrapped the user's step, and this class defines its own.
        self.__dict__.update({name: value for name, value in user.__dict__.items() if name != "step"})
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(user, hooks, OrderedDict())  # this class calls the hooks now, so the user's optimizer must not
        self._patch_step_function()  # torch does this for its own classes on construction, so that hooks are called
        self._user = user
        self.after_step: Callable[[], None] = lambda: None  # called at the end of every step

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch wraps every `step` with this decorator. Without hooks or an active profiler, `step` is called directly:
        torch's profiler annotation takes longer than the rest of a step of ours.
        """
        watched = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: AdoptedOptimizer, *args: Any, **kwargs: Any) -> Any:
            hooks = (*_GLOBAL_HOOKS, self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks)
            is_watched = any(hooks) or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            return (watched if is_watched else func)(self, *args, **kwargs)

        return step

    @property
    def user(self) -> torch.optim.Optimizer:
        """The optimizer that this one replaces."""
        return self._user

    def _begin_step(self, closure: Callable[[], Any] | None) -> Any:
        """Call the closure and return its loss, or None without a closure. Mark the step for existing schedulers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._user._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _load_in_place(
        self, owner: torch.optim.Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
    ) -> None:
        """Call `load(state_dict)`, which gives `owner` new groups, then restore the original group dictionaries.

        Schedulers and other holders of a group see the loaded options in it.
        """
        groups = owner.param_groups
        load(state_dict)
        for group, loaded in zip(groups, owner.param_groups, strict=True):
            group.update(loaded)
        owner.param_groups = self.param_groups = groups
