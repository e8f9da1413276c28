"""The user's optimizer in hybrid mode: it steps the network locally and sends the gradients of rows to the servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.ps.kernels.rows import all_finite
from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.ps.worker.finite_gradients import check_finite
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.communicator import Gradients
from torchfleet.ps.worker.modes.hybrid import rows_of
from torchfleet.ps.worker.optimizer_state import NetworkStates

if TYPE_CHECKING:  # servers create this optimizer too, and do not need torch.distributed
    from torchfleet.api.hybrid.dense_network import DenseNetwork


class HybridOptimizer(DistributedOptimizer):
    """One step() for both: the collective strategies step the network, the communicator sends gradients of rows."""

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        super().__init__(optimizer, plan, has_network=True)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ModelError(
                f"{type(optimizer).__name__} computes the loss several times in one step, by its closure, and in "
                "hybrid mode workers exchange gradients once a step. Use an optimizer whose step() needs no closure."
            )
        self._pushed = rows_of(plan)
        # Rows differ between workers: a norm over all parameters, which every worker clips by, must exclude them.
        for module in (module for group in plan.sparse.values() for module in group.modules):
            module.row_weight.is_shown = False
        self._network: DenseNetwork | None = None

    def join(self, network: DenseNetwork) -> None:
        """Attach the network, after the workers have met. From now on `step` steps it."""
        self._network = network
        network.on_zero_grad(self._drop_rows)

    def _drop_rows(self) -> None:
        self._bound()[0].drop_gradients(self.plan.sparse)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step network and rows. Gradients of rows are pushed at every step, even while the network accumulates its
        own (gradient_merge).
        """
        loss = self._begin_step(closure)
        network, communicator = self._joined(), self.communicator
        if hasattr(self, "found_inf"):
            raise StrategyError(
                "torch.amp.GradScaler in hybrid training: the network's gradients are averaged over workers under one "
                "scale, and those of rows are not in .grad. Leave the scaler out and use DistributedStrategy(amp=True)."
            )
        self._pushed.check_options(self._user)
        gradients, number = self._take_gradients(), communicator.num_steps + 1
        scale = network.row_scale
        if scale == 1.0:  # with another scale, non-finite gradients occur now and then, and the step is skipped
            network.check_finite(number)
            check_finite(self._pushed, gradients, number)
        is_finite = scale == 1.0 or self._unscale(gradients, scale)
        if network.row_share != 1.0:
            self._unscale(gradients, 1.0 / network.row_share)
        if not is_finite:
            network.note_overflow()
        is_made = network.step()
        if is_made and is_finite:
            communicator.step(gradients)
        self.after_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As in DistributedOptimizer: a scaler sets `found_inf` and always calls `step`."""
        return True

    def _unscale(self, gradients: Gradients, scale: float) -> bool:
        """Divide gradients of rows by `scale`, as copies: without zero_grad they count again. Returns whether all are
        finite. Columns after a row's gradient (shows, clicks) are unchanged.
        """
        is_finite = True
        for table, (keys, pushed) in list(gradients.sparse.items()):
            grads = pushed.copy()
            gradients.sparse[table] = keys, grads
            grads[:, : self.plan.sparse[table].spec.dim] *= np.float32(1.0 / scale)
            is_finite &= bool(all_finite(np.ascontiguousarray(grads).reshape(-1).view(np.uint32)))
        for update in gradients.cached:
            is_finite &= update.scale(1.0 / scale)
        return is_finite

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As in collective training: clips the network's gradients within the next step, and returns their norm."""
        return self._joined().optimizer.clip_grad_norm_(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Those of the network are kept while they accumulate over several steps."""
        if self._network is None:
            super().zero_grad(set_to_none)
            return
        self._drop_rows()
        self._bound()[1].drop_gradients(self._share)
        self._network.optimizer.zero_grad(set_to_none)

    @property
    def network_states(self) -> dict[Any, Any]:
        states: dict[Any, Any] = super().network_states if self._network is None else self._network.optimizer.state
        return states

    def kept_network(self) -> NetworkStates:
        return NetworkStates(self.network_states, self._joined().owns_state)

    def _joined(self) -> DenseNetwork:
        if self._network is None:
            raise FleetError(self._unbound)
        return self._network
