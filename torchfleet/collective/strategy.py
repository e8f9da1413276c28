"""The base class of collective strategies: what a strategy declares, and the hooks that a job calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.world import World

Forward = Callable[..., Any]
LossFn = Callable[[Any, Any], torch.Tensor]  # of (output, target): a mean over samples


class CallArguments(NamedTuple):
    """The arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Runner(Protocol):
    """Runs whole batches, because the layers of the model are on several ranks."""

    @property
    def refusal(self) -> str:
        """Why the model cannot be called; "" if it can be called, which requires that it returns its loss."""

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the outputs of the model."""

    @property
    def is_at_outputs(self) -> bool:
        """Whether the layers that run now, in a call of the model, are those that compute its outputs."""

    def train_batch(self, inputs: Any, target: Any, loss_fn: LossFn) -> torch.Tensor | None:
        """Run forward and backward of one batch; returns the loss where `is_last`, None elsewhere."""

    def eval_batch(self, inputs: Any) -> Any:
        """The outputs for one batch where `is_last`, None elsewhere."""

    def eval_loss(self, inputs: Any) -> torch.Tensor | None:
        """The loss that the model returns for one batch where `is_last`, None elsewhere."""

    def own_loss(self, output: Any, target: Any) -> torch.Tensor:
        """The loss among the outputs that the model returned."""

    def shared(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The loss of the rank where `is_last`, on every rank. All ranks of the pipeline call it together."""


class JobView(NamedTuple):
    """What a strategy learns about the job and, through it, about the other strategies."""

    model: torch.nn.Module  # converted by all strategies
    forward: Forward  # what a call of the model runs: its forward inside those of all strategies
    is_sharded: bool  # ranks hold different parameters: gradients may overflow on one rank and not on another
    runner: Runner | None
    has_own_backward: bool  # a strategy runs the model's backward passes itself, and calls `begin_backward`
    begin_backward: Callable[[], None]  # calls `begin_backward` of all strategies


class Strategy:
    """One strategy, switched on by one field of DistributedStrategy. build.py lists them in the order they act in.

    Subclasses set the declarations that apply to them and override the hooks they need; every hook does nothing by
    default. A declaration may also be set per instance, in `__init__`.

    field     the field's name; `configs` are the values of f"{field}_configs", defaults filled in
    settings  the whole DistributedStrategy
    """

    field = ""
    owns_gradients = False  # exchanges gradients itself; the job then has no DistributedDataParallel
    registers_hook = False  # `attach` registers a communication hook: one rank has DistributedDataParallel too
    accepts_local_parameters = True  # the model may have parameters marked `fleet_local`, which each rank owns
    has_own_backward = False  # runs the model's backward passes; `begin_backward` of all strategies is then called
    replaces_parameters = False  # `convert` replaces parameters by DTensors: they are sharded before they have values
    can_convert_again = False  # `convert` accepts a model that it has converted in an earlier job
    keeps_parameters_in_host = False  # parameters, gradients and optimizer state stay in host memory
    wants_loss = False  # `note_loss` is called for every batch
    trains_alone = False  # gradients differ from rank to rank at the step: each rank clips by its own norm
    wants_batch = False  # `convert` makes a dry step, with `dry_batch`
    refuses_clipping = ""  # why clip_grad_norm_ is refused, and what to use instead

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        self.settings, self.world = settings, world
        self.configs: Mapping[str, Any] = getattr(settings, f"{self.field}_configs", {})
        self.dry_batch: Any = None  # set before `convert` if it `wants_batch`

    # The model, once, in fleet.distributed_model

    def look_at(self, model: torch.nn.Module) -> None:
        """Called first, with the user's model as it is, the whole of it on every rank: to find what settings name."""

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Change the layers of the model, in place where possible.

        The model is moved to its device after all strategies have converted it. Parameters may have no values yet
        (torch's meta device): those of a user's model without memory, and all parameters if a strategy
        `replaces_parameters`.
        """
        return model

    def wrap_forward(self, forward: Forward) -> Forward:
        """Wrap the model's forward; every rank calls the result in every forward pass."""
        return forward

    def wrap_call(self, call: Forward) -> Forward:
        """Wrap a call of the model with gradients, including the exchange among ranks. Not used with a runner."""
        return call

    def attach(self, parallel: DistributedDataParallel) -> None:
        """Called with the job's DistributedDataParallel. At most one strategy registers a communication hook."""

    def runner(self) -> Runner | None:
        """The runner that runs batches instead of the model's forward. At most one strategy of a job has one."""
        return None

    def joined(self, job: JobView) -> None:
        """Called after all strategies have converted the model, from the first strategy to the last."""

    # The optimizer, once, in fleet.distributed_optimizer

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        """The optimizer that steps in place of `inner`; it must keep `inner.param_groups`, the same list object.

        `names` are those of the user's model, without the prefix of a wrapper.
        """
        return inner

    def owns_state(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps the optimizer state of this parameter, or its shard of it."""
        return True

    # Every step

    def begin_forward(self, exchanging: bool) -> None:
        """Called before a forward pass; `exchanging`: its backward pass exchanges gradients."""

    def exchanges(self) -> bool:
        """Whether the next backward pass exchanges its gradients among the ranks."""
        return True

    def begin_backward(self) -> None:
        """Called before the backward passes of a runner's batch, and before a backward pass that a strategy runs.

        Not called otherwise. Gradients that exist before it come from terms of the loss that bypass the model's
        outputs.
        """

    def scaled_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a runner's batch from which backward starts; its value does not change."""
        return loss

    def end_backward(self) -> None:
        """Called after the backward passes of a runner's batch, when gradients are complete."""

    def is_due(self) -> bool:
        """Whether the next optimizer.step() makes a step; False: it only accumulates further."""
        return True

    def note_accumulated(self) -> None:
        """Called in optimizer.step() if it only accumulated further."""

    def gradient_factor(self) -> float:
        """The factor by which `before_step` will multiply the gradients."""
        return 1.0

    def before_step(self) -> bool:
        """Called when gradients are complete and exchanged. False: skip the step (zero_grad still clears gradients)."""
        return True

    def after_step(self) -> None:
        """Called after the parameters have changed or the step was skipped, from the last strategy to the first."""

    def row_scale(self) -> float:
        """The scale of the gradients of rows that come out of the model's backward pass."""
        return 1.0

    def note_overflow(self) -> None:
        """Called if gradients of rows, which no other rank sees, are not finite after the division by `row_scale`."""

    def note_loss(self, loss: float | torch.Tensor) -> None:
        """The loss of the last batch: returned by the model or a runner, or the argument of fleet.report(loss=...)."""

    def close(self) -> None:
        """Called when the job is over, or gets other strategies: end threads."""

    # Checkpoints

    def before_save(self) -> None:
        """Called before a save: on return, parameters and what `state` returns must be equal on all ranks."""

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that are equal on all ranks: counters, scales."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `state` returned; missing names keep their present values."""

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Tensors that differ from rank to rank (residuals)."""
        return {}

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `rank_state` returned; if a different number of ranks saved it, the mean over them."""

    def after_load(self) -> None:
        """Called after model, optimizer and the states of all strategies have been loaded."""
