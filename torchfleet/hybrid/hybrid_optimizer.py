"""The user's optimizer in hybrid mode: it steps the network here, and hands the gradients of rows to the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchfleet.errors import FleetError
from torchfleet.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.worker.finite_gradients import check_finite
from torchfleet.worker.lookup.plan import Plan
from torchfleet.worker.modes.hybrid import rows_of
from torchfleet.worker.scaled_gradients import unscaled

if TYPE_CHECKING:  # servers make this optimizer too, and need no torch.distributed
    from torchfleet.hybrid.dense_network import DenseNetwork


class HybridOptimizer(DistributedOptimizer):
    """One step() for both: the network through the collective strategies, rows through the communicator."""

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        super().__init__(optimizer, plan)
        self._pushed = rows_of(plan)
        self._network: DenseNetwork | None = None

    def join(self, network: DenseNetwork) -> None:
        """The workers have met: from now on the network is stepped."""
        self._network = network

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Rows are pushed at every step, also where the network gathers gradients over several (gradient_merge)."""
        loss = self._begin_step(closure)
        network, communicator = self._joined(), self.communicator
        self._pushed.check_options(self._user)
        is_found_finite = unscaled(self)
        if hasattr(self, "found_inf"):  # of a user's GradScaler; rows are each worker's own, and so is what it finds
            is_found_finite = network.is_everywhere(is_found_finite)
        if not is_found_finite:
            self._bound()[0].take_gradients(self.plan.sparse)
            communicator.skip_step(self._share)
            network.skip_step()
            self.after_step()
            return loss
        gradients, number = self._take_gradients(), communicator.num_steps + 1
        if not network.may_overflow:
            network.check_finite(number)
            check_finite(self._pushed, gradients, number)
        if network.step():
            communicator.step(gradients)
        self.after_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As that of DistributedOptimizer: whether to step is for all workers to agree on."""
        return self._network is not None and self._network.num_workers > 1

    def clip_grad_norm_(self, max_norm: float) -> None:
        """As that of collective training: the network's gradients of the coming step, at the right moment."""
        self._joined().optimizer.clip_grad_norm_(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; those of the network stay while they are gathered over several steps."""
        if self._network is None:
            super().zero_grad(set_to_none)
            return
        engine, communicator = self._bound()
        engine.drop_gradients(self.plan.sparse)
        communicator.drop_gradients(self._share)
        self._network.optimizer.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Options of the param groups, and the state of the network; that of rows is on the servers."""
        self._load_in_place(self, super(DistributedOptimizer, self).load_state_dict, state_dict)
        if self._network is not None:
            state = self._network.optimizer.inner.state
            state.clear()
            state.update(self.state)
            self.state = state

    def _joined(self) -> DenseNetwork:
        if self._network is None:
            raise FleetError(self._unbound)
        return self._network
