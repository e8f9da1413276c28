"""Gradient accumulation: gradients of k batches are summed before they are exchanged and the parameters step once.

    g = (1/k) · Σ_{i=1..k} g_i        (avg=True; the sum otherwise)

k batches of n samples equal one of k·n when the loss is a mean over samples (no batch norm). Only every k-th backward
pass communicates; `optimizer.step()` and `zero_grad()` do nothing in between, so the loop stays as it is. Known as
gradient accumulation (Ott et al. 2018, Scaling Neural Machine Translation). Composes with every strategy; inside a
pipeline micro-batches are merged already, and k counts whole batches.
"""

from __future__ import annotations

import torch

from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.tensors.local_tensors import local
from torchfleet.collective.world import World


class GradientMerge(Strategy):
    field = "gradient_merge"

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._k: int = self.settings.gradient_merge_configs.k_steps
        self._num = 0  # batches accumulated

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        self._groups = inner.param_groups
        return inner

    def exchanges(self) -> bool:
        return self.is_due()

    def is_due(self) -> bool:
        return self._num + 1 >= self._k

    def note_accumulated(self) -> None:
        self._num += 1

    def gradient_factor(self) -> float:
        return 1.0 / self._k if self.settings.gradient_merge_configs.avg else 1.0

    def before_step(self) -> bool:
        if (factor := self.gradient_factor()) != 1.0:
            every = [parameter for group in self._groups for parameter in group["params"]]
            gradients = [local(parameter.grad) for parameter in every if parameter.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)
        return True

    def after_step(self) -> None:
        self._num = 0

    def after_load(self) -> None:
        """Begin anew: gradients accumulated so far are not saved, and those from before the load are dropped."""
        self._num = 0
