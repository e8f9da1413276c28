"""What a strategy may do to a job: the places at which it is called, all of which do nothing unless it says more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchfleet.collective.world import World
from torchfleet.strategy.distributed_strategy import DistributedStrategy

Forward = Callable[..., Any]


class Part:
    """One strategy, switched on by one field of DistributedStrategy. build.py lists them in the order they act in.

    field    its name in DistributedStrategy; `configs` is that of f"{field}_configs", defaults filled in
    """

    field = ""
    owns_gradients = False  # this part exchanges them itself; there is no DistributedDataParallel then

    def __init__(self, strategy: DistributedStrategy, world: World) -> None:
        self.strategy, self.world = strategy, world
        self.configs: Mapping[str, Any] = getattr(strategy, f"{self.field}_configs", {})

    # The model, once, in fleet.distributed_model

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Change the layers of the model, in place where possible. It is on its device already."""
        return model

    def around(self, forward: Forward) -> Forward:
        """What runs in the place of the model's forward; called on every rank for every forward."""
        return forward

    def build(self, model: torch.nn.Module, forward: Forward) -> None:
        """All parts have converted the model; `forward` is what calling it does."""

    def attach(self, parallel: DistributedDataParallel) -> None:
        """Register how gradients are exchanged (at most one part does)."""

    # The optimizer, once, in fleet.distributed_optimizer

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        """The optimizer that steps in the place of `inner`; it must keep `inner.param_groups`, the very list.

        Names of parameters are those of the user's model, without anybody's prefix.
        """
        return inner

    # Every step

    def begin_forward(self, exchanging: bool) -> None:
        """A forward pass is about to run; `exchanging`: its backward pass is to exchange gradients."""

    def exchanges(self) -> bool:
        """Whether the gradients of the backward pass that is about to come are exchanged among the ranks."""
        return True

    def begin_backward(self) -> None:
        """The backward passes of a pipeline are about to begin. Elsewhere a part must notice by itself."""

    def end_backward(self) -> None:
        """The backward passes of a pipeline are over, and gradients are complete."""

    def is_due(self) -> bool:
        """Whether optimizer.step() steps this time, or goes on gathering; called once per optimizer.step()."""
        return True

    def before_step(self) -> bool:
        """Gradients are there, exchanged. False: skip this step (zero_grad still clears the gradients)."""
        return True

    def after_step(self) -> None:
        """The parameters have changed, or the step was skipped. Called from the last part of the list to the first."""

    def note_loss(self, loss: float | torch.Tensor) -> None:
        """The loss of the last batch, where it is known: the model returned it, or fleet.report(loss=...) said it."""

    # Kept with the model by fleet.save

    def before_save(self) -> None:
        """The model is about to be saved: what `state` says equal on all ranks, and the parameters, must be."""

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that are equal on all ranks: counters, scales."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """What `state` gave; missing names keep what they are."""

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Tensors of this rank alone (residuals)."""
        return {}

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """What `rank_state` gave; saved by another number of ranks, the mean over them."""

    def after_load(self) -> None:
        """Model, optimizer and the parts' own states have been loaded."""
