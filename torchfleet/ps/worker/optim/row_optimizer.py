"""Steps of an optimizer that is one formula on a weight and its state: on dense parameters, and on the rows of sparse
gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from torchfleet.ps.worker.optim.without_parameters import MayLackParameters

State = dict[str, torch.Tensor]


class _Stepping(torch.optim.Optimizer):
    """A parameter with a dense gradient is updated whole. With a sparse gradient only the rows that the gradient names
    are updated, as on the servers.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter, parameter.grad)
        return loss

    def _step_one(self, group: dict[str, Any], parameter: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._first_state(group, parameter, grad.is_sparse))
        if not grad.is_sparse:
            self._update(group, parameter, grad, state)
            return
        grad = grad.coalesce()
        rows = grad.indices()[0]
        weight, own = parameter[rows], {name: values[rows] for name, values in state.items()}
        self._update(group, weight, grad.values(), own)
        parameter[rows] = weight
        for name, values in own.items():
            state[name][rows] = values

    @abstractmethod
    def _first_state(self, group: dict[str, Any], parameter: torch.Tensor, has_rows: bool) -> State:
        """The state before the first update. `has_rows`: gradients are sparse, and dimension 0 counts rows."""

    @abstractmethod
    def _update(self, group: dict[str, Any], weight: torch.Tensor, grad: torch.Tensor, state: State) -> None:
        """Change `weight` and `state` in place."""


class RowOptimizer(MayLackParameters, _Stepping):
    """An optimizer that torch does not have."""


def with_decay(group: dict[str, Any], weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient with the group's weight decay. Decoupled decay changes `weight` in place, and not the gradient."""
    decay = group["weight_decay"]
    if decay and group["decoupled_weight_decay"]:
        weight.mul_(1.0 - group["lr"] * decay)
    return grad.add(weight, alpha=decay) if decay and not group["decoupled_weight_decay"] else grad
