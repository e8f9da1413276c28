"""The optimizer that fleet.distributed_optimizer returns: it steps the user's optimizer under the strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchfleet.base.adoption import AdoptedOptimizer
from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.collective.clipping import scale_down, total_norm
from torchfleet.collective.collective_model import job_is_over
from torchfleet.collective.device_rows import DeviceRows
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.tensors.local_steps import LocalSteps
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
        device_rows: DeviceRows | None = None,
    ) -> None:
        super().__init__(user)
        self.inner, self._strategies = inner, tuple(strategies)
        self._local_steps = LocalSteps(inner)
        self._parameters = parameters  # of the model; an optimizer of float32 copies has others
        self._world, self._rows = world, device_rows
        self.grad_norm = torch.full((), math.nan)  # the norm that clip_grad_norm_ found last
        self._max_norm: float | None = None
        self.is_gathering = False  # the last `step` accumulated gradients, and more are to come
        self.is_skipped = False  # whether a strategy skipped the last step
        self.on_call: Callable[[], object] = lambda: None  # called at the end of every `step`, also an accumulating one
        self.num_steps = 0
        self._ended_by = ""  # the call that ended the job

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

    def end(self, ended_by: str) -> None:
        """Refuse steps from now on, because the job is over."""
        self._ended_by = ended_by

    def _step(self) -> None:
        if self._ended_by:
            raise job_is_over("the optimizer", self._ended_by)
        self.is_gathering, self.is_skipped = not self._is_due(), False
        if self.is_gathering:
            for strategy in self._strategies:
                strategy.note_accumulated()
            return
        factor = self._row_factor()
        answers = [strategy.before_step() for strategy in self._strategies]
        self.is_skipped = not all(answers)
        if not self.is_skipped:
            self._clip()
            self._local_steps.step()
            if self._rows is not None:
                self._rows.step(self._user, factor)
        elif self._rows is not None:
            self._rows.drop()
        self._max_norm = None
        for strategy in reversed(self._strategies):
            strategy.after_step()
        self.num_steps += 1
        self.after_step()

    def _row_factor(self) -> float:
        """The factor for the gradients of rows. Tells the strategies if scaled gradients of rows have overflowed."""
        if self._rows is None:
            return 1.0
        scales = [strategy.row_scale() for strategy in self._strategies]
        if any(scale != 1.0 for scale in scales) and not self._rows.is_finite():
            for strategy in self._strategies:
                strategy.note_overflow()
        factors = [strategy.gradient_factor() for strategy in self._strategies]
        # The factor of a strategy that scales the loss may be 1, because backward has divided the other gradients.
        return math.prod(factor if scale == 1.0 else 1.0 / scale for factor, scale in zip(factors, scales, strict=True))

    def _is_due(self) -> bool:
        answers = [strategy.is_due() for strategy in self._strategies]
        return all(answers)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the next step to a total norm; returns the norm before clipping, also as `grad_norm`.

        All ranks call it together, between backward and `step`. If no rank has all gradients, the norm is that of the
        gradients of all ranks; under localsgd it is that of this rank's own. `.grad` is scaled within the step, when it
        is complete under every strategy. While gradients are accumulated, nothing is clipped: returns the norm of the
        last update, NaN before the first one.
        """
        if not max_norm > 0:
            raise FleetError(f"clip_grad_norm_: max_norm must be positive, found {max_norm}")
        for strategy in self._strategies:
            if strategy.refuses_clipping:
                raise StrategyError(strategy.refuses_clipping)
        if self._is_due():
            self._check_gradients()
            is_exchanged = not any(strategy.trains_alone for strategy in self._strategies)
            factor = math.prod(strategy.gradient_factor() for strategy in self._strategies)
            self.grad_norm = total_norm(self._parameters, self._world, is_exchanged) * factor
            self._max_norm = max_norm
        return self.grad_norm

    def _check_gradients(self) -> None:
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if trained and all(parameter.grad is None for parameter in trained):
            raise FleetError(
                "clip_grad_norm_: no parameter has a gradient. Call it after loss.backward() and before "
                "optimizer.step(); with a closure, inside of the closure."
            )

    def _clip(self) -> None:
        if self._max_norm is not None:
            stepped = [parameter for group in self.param_groups for parameter in group["params"]]
            scale_down(stepped, self.grad_norm, self._max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; does nothing while they are accumulated over several batches."""
        if self.is_gathering:
            return
        self._max_norm = None  # the gradients that it was meant for are dropped
        if self._rows is not None:
            self._rows.drop()
        if set_to_none:
            for parameter in self._parameters:
                parameter.grad = None
            return
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.requires_grad_(False)  # not detach_(): it may be a view of a bucket
        if gradients:
            torch._foreach_zero_([local(gradient) for gradient in gradients])

    def begin_anew(self) -> None:
        """Called after other values have been loaded: drop what has been accumulated for a step of the old ones."""
        is_gathering = self.is_gathering or not self._is_due()
        for strategy in self._strategies:
            strategy.after_load()
        self.is_gathering = False
        if is_gathering:
            self.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ModelError(
            "add_param_group: the strategies are in place. Give the optimizer these parameters before "
            "fleet.distributed_optimizer, in a group of their own, with lr=0 until they are to be trained."
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Raises ModelError if tables on devices have state of their own."""
        if self._rows is not None:
            self._rows.check_states("optimizer.state_dict()")
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; the groups stay the same dicts, to which schedulers hold references. Raises ModelError if tables
        on devices have state of their own.
        """
        if self._rows is not None:
            self._rows.check_states("optimizer.load_state_dict")
        self._load_in_place(self.inner, self.inner.load_state_dict, state_dict)
