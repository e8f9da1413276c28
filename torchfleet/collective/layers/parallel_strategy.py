"""The strategy `tensor_parallel`: cuts fleet.nn's parallel layers, and the layers that a plan names.

    tensor_parallel_configs={"tensor_parallel_degree": 2, "plan": {"layers.*.up": "column", "layers.*.down": "row"}}

Without a plan, a model of a class that plan_presets.py knows is cut by its preset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.gradient_average import GradientAverage
from torchfleet.collective.layers.cutting import tie_again, uses
from torchfleet.collective.layers.parallel_random import CutRandom
from torchfleet.collective.layers.plan_presets import PRESETS, Plan, preset_of
from torchfleet.collective.layers.plans import apply, planned
from torchfleet.collective.layers.tensor_parallel import LAYERS
from torchfleet.collective.strategy import Forward, JobView, Strategy
from torchfleet.collective.tensors.one_kind import OneKindGroups
from torchfleet.collective.tensors.outputs import map_tensors, tensors
from torchfleet.collective.world import World


class TensorParallel(Strategy):
    field = "tensor_parallel"
    accepts_local_parameters = False

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._degree = world.axis("model").size
        self.owns_gradients = self.replaces_parameters = self._degree > 1
        self._average = GradientAverage(settings, world, ends_itself=True)
        self._is_told = self._is_to_exchange = (
            False  # whether `begin_backward` is called; whether the next backward pass exchanges
        )
        self._random, self._is_planned = CutRandom(), False

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the layers in place, before their parameters have values."""
        layers = [module for module in model.modules() if isinstance(module, LAYERS)]
        found = planned(model, self._plan(model, has_layers=bool(layers)), self._degree)
        if self._degree == 1:
            return model
        if not layers and not found:
            raise ModelError(_nothing_to_cut(type(model).__name__, self._degree))
        if found and self.settings.pipeline:
            raise StrategyError(
                "tensor_parallel by a plan and pipeline cannot be used together: a plan works in hooks, which the "
                "stages of a pipeline do not have. Use fleet.nn.ColumnParallelLinear and its like in the model, or "
                "leave one of them out."
            )
        tied, mesh = uses(model), self.world.mesh["model"]
        for layer in layers:
            layer.cut(mesh)
        apply(found, mesh, self._random)
        tie_again(model, tied)
        self._is_planned = bool(found)
        return model

    def _plan(self, model: torch.nn.Module, has_layers: bool) -> Plan:
        """The user's plan, or else the preset of the model's class if the model has no parallel layers of its own."""
        configs = self.settings.tensor_parallel_configs
        if configs.plan and configs.sequence_parallel:
            raise StrategyError(
                "tensor_parallel_configs['sequence_parallel'] is for models whose class has a preset, and ['plan'] is "
                "given: write 'blocks' and 'sequence' into the plan"
            )
        preset = {} if configs.plan or has_layers else preset_of(model, configs.sequence_parallel)
        if configs.sequence_parallel and not preset:
            raise StrategyError(
                f"tensor_parallel_configs['sequence_parallel']=True: a {type(model).__name__} has no preset. Give a "
                "plan with 'blocks' and 'sequence'."
            )
        return configs.plan or preset

    def wrap_forward(self, forward: Forward) -> Forward:
        if not self._is_planned:
            return forward

        def planned_forward(*args: Any, **kwargs: Any) -> Any:
            try:
                outputs = forward(*args, **kwargs)
            finally:
                self._random.leave()
            return _plain(outputs)

        return planned_forward

    def joined(self, job: JobView) -> None:
        self._is_told = job.has_own_backward
        for parameter in job.model.parameters():
            if self._is_planned and isinstance(parameter, DTensor) and parameter.requires_grad:
                parameter.register_hook(partial(_as_parameter, parameter.placements))  # type: ignore[no-untyped-call]
        if self.owns_gradients and job.runner is None:  # a runner averages itself
            self._average.watch(job.model.parameters())

    def begin_forward(self, exchanging: bool) -> None:
        self._is_to_exchange = exchanging
        self._average.begin(exchanging and not self._is_told)

    def begin_backward(self) -> None:
        if self._is_told:
            self._average.begin(self._is_to_exchange)

    def optimizer(self, inner: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> torch.optim.Optimizer:
        self._groups = OneKindGroups(inner)
        return inner

    def before_step(self) -> bool:
        self._groups.split()
        return True

    def after_step(self) -> None:
        self._groups.join()


def _nothing_to_cut(kind: str, degree: int) -> str:
    layers = ", ".join("fleet.nn." + layer.__name__ for layer in LAYERS)
    return (
        f"tensor_parallel=True with degree {degree}, but the model has no layer that can be cut: use {layers} in it, "
        f"or give tensor_parallel_configs['plan']; {kind} is not among the classes that have a plan "
        f"({', '.join(PRESETS)}). Or leave tensor_parallel out."
    )


def _plain(outputs: Any) -> Any:
    """The outputs as plain tensors. In training, sharded logits stay DTensors if the model has computed its loss."""
    found = list(tensors(outputs))
    has_loss = torch.is_grad_enabled() and any(not tensor.dim() and tensor.requires_grad for tensor in found)

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        is_kept = not isinstance(tensor, DTensor) or (has_loss and tensor.dim())
        return tensor if is_kept else tensor.full_tensor()  # type: ignore[attr-defined]

    return map_tensors(plain, outputs) if any(isinstance(tensor, DTensor) for tensor in found) else outputs


def _as_parameter(placements: Sequence[Placement], gradient: torch.Tensor) -> torch.Tensor:
    """A gradient sharded as its parameter is. The gradient of a norm is summed over the parts of the sequence."""
    if isinstance(gradient, DTensor) and tuple(gradient.placements) != tuple(placements):
        return gradient.redistribute(placements=placements)
    return gradient
