"""An optimizer in the place of the user's: its param groups, state and hooks, with another step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Hooks of all optimizers of the process: torch.optim.optimizer.register_optimizer_step_pre_hook and ..._post_hook.
_GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


class AdoptedOptimizer(torch.optim.Optimizer):
    """The same param groups as the user's optimizer, shared with it: a scheduler made for either works on both.

    Step hooks that the user's optimizer had are called by this one, once per step. Derived classes write `step`, which
    begins with `_begin_step`.
    """

    def __init__(self, user: torch.optim.Optimizer) -> None:
        # All but `step`: a scheduler made before has wrapped the user's step, and ours is another.
        self.__dict__.update({name: value for name, value in user.__dict__.items() if name != "step"})
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(user, hooks, OrderedDict())  # they are ours now; a step of the user's optimizer would repeat them
        self._patch_step_function()  # what torch does for its own classes when they are made: hooks are called
        self._user = user
        self.after_step: Callable[[], None] = lambda: None  # called at the end of every step

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch wraps every `step` with this. Where nobody looks on, by a hook or a profiler, the step is called as it
        is: a mark for a profiler takes longer than all of our own work on the step."""
        watched = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: AdoptedOptimizer, *args: Any, **kwargs: Any) -> Any:
            hooks = (*_GLOBAL_HOOKS, self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks)
            is_watched = any(hooks) or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            return (watched if is_watched else func)(self, *args, **kwargs)

        return step

    @property
    def user(self) -> torch.optim.Optimizer:
        """The optimizer in whose place this one stands."""
        return self._user

    def _begin_step(self, closure: Callable[[], Any] | None) -> Any:
        """The closure's loss, None without one. A scheduler that was made before sees that a step was made."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._user._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _load_in_place(
        self, owner: torch.optim.Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
    ) -> None:
        """`load(state_dict)`, which gives `owner` new groups; then the groups are again the dictionaries they were.

        Schedulers, and whoever else holds a group, see the loaded options in it.
        """
        groups = owner.param_groups
        load(state_dict)
        for group, loaded in zip(groups, owner.param_groups, strict=True):
            group.update(loaded)
        owner.param_groups = self.param_groups = groups
