"""The optimizer that fleet.distributed_optimizer returns: it steps the user's optimizer under the strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchfleet.base.adoption import AdoptedOptimizer
from torchfleet.base.errors import FleetError, ModelError
from torchfleet.collective.clipping import clip_grad_norm
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.tensors.local_tensors import local
from torchfleet.collective.world import World


class CollectiveOptimizer(AdoptedOptimizer):
    """Has the user's param groups (shared, so that schedulers work on either optimizer), step() and zero_grad().

    `step` goes through the strategies: some accumulate gradients first (gradient_merge), some skip a step (amp), some
    exchange parameters after it (localsgd, sharding).
    """

    def __init__(
        self,
        user: torch.optim.Optimizer,
        inner: torch.optim.Optimizer,
        strategies: Sequence[Strategy],
        parameters: Sequence[torch.nn.Parameter],
        world: World,
    ) -> None:
        super().__init__(user)
        self.inner, self._strategies = inner, tuple(strategies)
        self._parameters = parameters  # of the model; an optimizer of float32 copies has others
        self._world, self.grad_norm = world, torch.zeros(())
        self._max_norm: float | None = None
        self._is_gathering = False
        self.is_skipped = False  # whether a strategy skipped the last step
        self.on_call: Callable[[], object] = lambda: None  # called at the end of every `step`, also an accumulating one
        self.num_steps = 0

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._begin_step(closure)
        self._step()
        self.on_call()
        return loss

    def _step(self) -> None:
        answers = [strategy.is_due() for strategy in self._strategies]
        self._is_gathering, self.is_skipped = not all(answers), False
        if self._is_gathering:
            return
        answers = [strategy.before_step() for strategy in self._strategies]
        self.is_skipped = not all(answers)
        if not self.is_skipped:
            self._clip()
            self.inner.step()
        for strategy in reversed(self._strategies):
            strategy.after_step()
        self.num_steps += 1
        self.after_step()

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip the gradients of the next step to a total norm; call it before `step`.

        The clipping happens at the right moment under every strategy: after gradients have been accumulated, and over
        the gradients of all ranks if no rank has all of them. `grad_norm` is then the norm before clipping.
        """
        if not max_norm > 0:
            raise FleetError(f"clip_grad_norm_: max_norm must be positive, found {max_norm}")
        self._max_norm = max_norm

    def _clip(self) -> None:
        if self._max_norm is not None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            self.grad_norm = clip_grad_norm(parameters, self._max_norm, self._world)
            self._max_norm = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; does nothing while they are accumulated over several batches."""
        if self._is_gathering:
            return
        if set_to_none:
            for parameter in self._parameters:
                parameter.grad = None
            return
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.requires_grad_(False)  # not detach_(): it may be a view of a bucket
        if gradients:
            torch._foreach_zero_([local(gradient) for gradient in gradients])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ModelError("add_param_group: the strategies are in place; add it before fleet.distributed_optimizer")

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; the groups stay the same dicts, to which schedulers hold references."""
        self._load_in_place(self.inner, self.inner.load_state_dict, state_dict)
