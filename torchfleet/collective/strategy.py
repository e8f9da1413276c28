"""The base class of collective strategies: what a strategy declares, and the hooks a job calls it by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.world import World

Forward = Callable[..., Any]
LossFn = Callable[[Any, Any], torch.Tensor]  # of (output, target): a mean over samples


class Runner(Protocol):
    """Runs whole batches when the model cannot be called by itself, because its layers are on several ranks."""

    @property
    def refusal(self) -> str:
        """The error of calling the model directly."""

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the outputs of the model."""

    def train_batch(self, inputs: Any, target: Any, loss_fn: LossFn) -> torch.Tensor | None:
        """Forward and backward of one batch; the loss where `is_last`, None elsewhere."""

    def eval_batch(self, inputs: Any) -> Any:
        """The outputs for one batch where `is_last`, None elsewhere."""


class JobView(NamedTuple):
    """What a strategy learns about the job and, through it, about the other strategies."""

    model: torch.nn.Module  # converted by all strategies
    forward: Forward  # what calling the model runs: its forward inside those of all strategies
    is_sharded: bool  # ranks hold different parameters, so that one rank's gradients may overflow and another's not
    runner: Runner | None
    has_own_backward: bool  # a strategy makes the model's backward passes by themselves, and calls `begin_backward`
    begin_backward: Callable[[], None]  # that of all strategies


class Strategy:
    """One strategy, switched on by one field of DistributedStrategy. build.py lists them in the order they act in.

    Subclasses set the declarations that apply to them and override the hooks they need; every hook does nothing by
    default. A declaration may also be set per instance, in `__init__`.

    field     the field's name; `configs` are the values of f"{field}_configs", defaults filled in
    settings  the whole DistributedStrategy
    """

    field = ""
    owns_gradients = False  # exchanges gradients itself; the job then has no DistributedDataParallel
    registers_hook = False  # `attach` registers a communication hook: one rank alone has DistributedDataParallel too
    accepts_local_parameters = True  # the model may have parameters marked `fleet_local`, which are each rank's own
    has_own_backward = False  # makes the model's backward passes by themselves; `begin_backward` of all is then called
    replaces_parameters = False  # `convert` puts DTensors in their place: they are cut before they have values
    keeps_parameters_in_host = False  # parameters, gradients and optimizer state stay in host memory
    wants_loss = False  # `note_loss` is to be called for every batch

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        self.settings, self.world = settings, world
        self.configs: Mapping[str, Any] = getattr(settings, f"{self.field}_configs", {})

    # The model, once, in fleet.distributed_model

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Change the layers of the model, in place where possible.

        It is moved to its device when all strategies have converted it. Parameters may have no values yet (torch's meta
        device): those of a user's model without memory, and all if a strategy `replaces_parameters`.
        """
        return model

    def wrap_forward(self, forward: Forward) -> Forward:
        """Wrap the model's forward; what it returns is called on every rank for every forward pass."""
        return forward

    def wrap_call(self, call: Forward) -> Forward:
        """Wrap a call of the model with gradients, the exchange among ranks included. Not used beside a runner."""
        return call

    def attach(self, parallel: DistributedDataParallel) -> None:
        """Data parallelism is made. At most one strategy of a job registers how buckets are exchanged."""

    def runner(self) -> Runner | None:
        """What runs batches in the place of the model's forward. At most one strategy of a job has one."""
        return None

    def joined(self, job: JobView) -> None:
        """All strategies have converted the model. Called from the first strategy to the last."""

    # The optimizer, once, in fleet.distributed_optimizer

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        """The optimizer that steps in the place of `inner`; it must keep `inner.param_groups`, the very list.

        `names` are those of the user's model, without any wrapper's prefix.
        """
        return inner

    def owns_state(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps the optimizer's state of this parameter of the optimizer, or its shard of it."""
        return True

    # Every step

    def begin_forward(self, exchanging: bool) -> None:
        """A forward pass is about to run; `exchanging`: its backward pass is to exchange gradients."""

    def exchanges(self) -> bool:
        """Whether the coming backward pass exchanges its gradients among the ranks."""
        return True

    def begin_backward(self) -> None:
        """The backward passes of a runner's batch, or one that a strategy makes, are about to begin.

        Not called otherwise. Gradients that come before are of what is beside the model's outputs in the loss.
        """

    def scaled_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a runner's batch, as its backward pass is to begin with; its value stays."""
        return loss

    def end_backward(self) -> None:
        """The backward passes of a runner's batch are over, and gradients are complete."""

    def is_due(self) -> bool:
        """Whether optimizer.step() steps this time, or goes on accumulating; called once per optimizer.step()."""
        return True

    def before_step(self) -> bool:
        """Gradients are complete and exchanged. False: skip this step (zero_grad still clears the gradients)."""
        return True

    def after_step(self) -> None:
        """The parameters have changed, or the step was skipped. Called from the last strategy to the first."""

    def row_scale(self) -> float:
        """How many times too large the gradients are that come out of the model's backward pass: those of rows."""
        return 1.0

    def note_overflow(self) -> None:
        """Gradients of rows, which no other rank sees, were not finite after the division by `row_scale`."""

    def note_loss(self, loss: float | torch.Tensor) -> None:
        """The loss of the last batch: what the model or a runner returned, or fleet.report(loss=...) was given."""

    # Checkpoints

    def before_save(self) -> None:
        """The model is about to be saved: parameters, and what `state` returns, must be equal on all ranks."""

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that are equal on all ranks: counters, scales."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """What `state` returned; missing names keep their present values."""

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Tensors of this rank alone (residuals)."""
        return {}

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """What `rank_state` returned; if another number of ranks saved it, the mean over them."""

    def after_load(self) -> None:
        """Model, optimizer and the states of all strategies have been loaded."""
