"""The user's optimizer in hybrid mode: it steps the network here, and hands the gradients of rows to the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchfleet.errors import FleetError, StrategyError
from torchfleet.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.worker.finite_gradients import check_finite
from torchfleet.worker.lookup.plan import Plan
from torchfleet.worker.modes.hybrid import rows_of

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
        if hasattr(self, "found_inf"):  # a GradScaler has left it, which it does only where workers step together
            raise StrategyError(
                "torch.amp.GradScaler in hybrid training: each worker's scaler goes by its own rows, so that their "
                "scales differ, and gradients of the network are averaged under one scale. Leave the scaler out and "
                "use DistributedStrategy(amp=True), whose scale all workers share."
            )
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
        """As that of DistributedOptimizer. One worker alone may have a scaler; of several, `step` hears of it."""
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
