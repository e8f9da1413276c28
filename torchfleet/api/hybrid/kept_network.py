"""The copy of hybrid mode's network on the servers: for saves, for other modes, and for workers that restart.

It always has the values. It has the optimizer's state where the table's rule names torch's state
(RowRule.state_names): the moments of Adam and AdamW, the sums of Adagrad, the momentum of SGD. So training can
continue in another mode and return without a difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.shard import Floats
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.torch_states import BlockState, states_of

_SHARE = 0.01  # share of the time that copies may take


class KeptNetwork:
    """Worker 0 writes the network to the servers; every worker may read it."""

    def __init__(
        self,
        plan: Plan,
        optimizer: CollectiveOptimizer,
        owns_state: Callable[[torch.Tensor], bool],
        seconds: float,
    ) -> None:
        """`owns_state`: whether this worker has the state of a parameter. `seconds`: time between two copies."""
        self._groups, self._fixed, self._optimizer = plan.dense, plan.fixed, optimizer
        self._owns_state = owns_state
        self._seconds, self._next = seconds, time.monotonic() + seconds
        self._num_before = 0  # steps of the tables before this job

    def take(self, client: Client) -> None:
        """Read the optimizer's state from the servers. The model already has the values."""
        for group in self._groups:
            block, step = client.pull_block(group.spec.name)
            self._num_before = max(self._num_before, step)
            if step and group.spec.num_states:
                self._write_state(group, block[1:], step)

    def put(self, client: Client) -> None:
        """Write the values, the buffers, and the state that the table holds. They are applied when this returns."""
        start = time.monotonic()
        for group in self._groups:
            client.set_block(group.spec.name, *self._block(group))
        for group in self._fixed:
            client.set_dense(group.spec.name, group.values())
        now = time.monotonic()
        self._next = now + (max(self._seconds, (now - start) / _SHARE) if self._seconds else 0.0)

    def put_if_due(self, client: Client) -> None:
        """Write every `seconds`, or less often if a copy takes long."""
        if time.monotonic() >= self._next:
            self.put(client)

    def _block(self, group: DenseGroup) -> tuple[Floats, int]:
        rule = group.spec.rule
        rows = [group.values()]
        step = self._num_steps(group) if self._has_all_state(group) else 0
        first = rule.row_rule.initial_state(rule)
        for name in rule.row_rule.state_names(rule):
            parts = [self._state(parameter, name, first if not step else None) for parameter in group.parameters]
            rows.append(torch.cat([part.reshape(-1) for part in parts]).cpu().numpy())
        return np.stack(rows), step

    def _state(self, parameter: torch.Tensor, name: str, fill: float | None) -> torch.Tensor:
        """The optimizer's state of a parameter, zeros if it never had a gradient; with `fill`, that everywhere."""
        found = self._optimizer.inner.state.get(parameter, {}).get(name) if fill is None else None
        return torch.full_like(parameter, fill or 0.0) if found is None else found.detach().float()

    def _num_steps(self, group: DenseGroup) -> int:
        """The optimizer's step count or, if it has none, the number of steps made."""
        states = [self._optimizer.inner.state.get(parameter, {}) for parameter in group.parameters]
        counted = [int(state["step"]) for state in states if "step" in state]
        return max(counted) if counted else self._num_before + self._optimizer.num_steps

    def _has_all_state(self, group: DenseGroup) -> bool:
        return all(self._owns_state(parameter) for parameter in group.parameters)

    def _write_state(self, group: DenseGroup, states: Floats, step: int) -> None:
        for parameter, state in zip(group.parameters, states_of(group, BlockState(states, step)), strict=True):
            if self._owns_state(parameter):
                self._optimizer.inner.state[parameter] = state
