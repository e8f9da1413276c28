"""`fleet plan --model`: memory and time of a rank in collective training, by strategy, before anything runs.

With Ψ bytes of parameters, as many of gradients, K of optimizer state and A of activations, on n ranks:

                              at rest        in a step                exchanged
    data parallelism          2Ψ + K         A                        2Ψ (n-1)/n
    sharding, stage 1         2Ψ + K/n       A                        3Ψ (n-1)/n
    sharding, stage 2         (2Ψ + K)/n     Ψ + U(1+s) + A           2Ψ (n-1)/n
    sharding, stage 3         (2Ψ + K)/n     U(3+s) + R(1+s) + A      3Ψ (n-1)/n
    stage 3, context_parallel (2Ψ + K)/n     ... + A/n                3Ψ (n-1)/n, and keys and values

A is the most that forward and backward hold at a time, temporary tensors included (traced_step.py). U are the
parameters of the largest unit that is gathered at once, R those outside of all units, which stay gathered from forward
to backward. In backward, stage 3 holds a unit's parameters, the next unit's parameters, which are being gathered, and
the unit's gradients before they are reduced: 3U. The buffer from which gradients are reduced, and the gradients of R,
use memory that activations have left, which are freed before: s = max(0, 1 - A/Ψ) is the share that it does not cover.
Beside its gathered parameters, stage 2 holds gradients only.

The model is made and called on torch's meta device: no memory is taken and nothing is computed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchfleet.base.errors import ModelError

if TYPE_CHECKING:
    import torch

STATES = {"sgd": 0, "momentum": 1, "adam": 2}  # optimizer → tensors of a parameter's size and type


@dataclass(frozen=True)
class ModelSize:
    """Bytes and operations of a model and one batch."""

    parameters: int  # trained ones
    frozen: int  # other parameters, and buffers
    largest: int  # the parameters of the largest unit, which stage 3 gathers at once
    outside: int  # parameters outside of all units, which stay gathered
    activations: int  # the most that forward and backward hold at a time; 0: the inputs are not known
    flops: float  # of forward and backward


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and exchanges under a strategy."""

    strategy: str
    state_bytes: float  # parameters, gradients and optimizer state, at rest
    gathered_bytes: float  # parameters and gradients of other ranks, in a step
    activation_bytes: float
    exchanged_bytes: float  # in a step

    @property
    def bytes(self) -> float:
        return self.state_bytes + self.gathered_bytes + self.activation_bytes


def size_of(path: str) -> ModelSize:
    """The size of the model that `module:function` makes, alone or with the tuple of its inputs."""
    import torch

    from torchfleet.observe.plan.traced_step import traced_step

    with torch.device("meta"):
        made = _function(path)()
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"--model {path}: expected a torch.nn.Module, or (model, inputs), found {type(made).__name__}")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    every = [*model.parameters(), *model.buffers()]
    own = sum(tensor.nbytes for tensor in every if id(tensor) in trained)
    largest, outside = _units(model)
    held, flops = (0, 0.0) if inputs is None else traced_step(model, inputs)
    return ModelSize(own, sum(tensor.nbytes for tensor in every) - own, largest, outside, held, flops)


def _function(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:  # python -m looks there, a console script does not
        sys.path.append(os.getcwd())
    try:
        found: Callable[[], Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"--model {path}: expected module:function, such as train:make_model, in this folder or one of PYTHONPATH: "
            f"{error}"
        ) from None
    return found


def _units(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of the largest unit of sharding at its default settings, and of the parameters outside of all units."""
    from torchfleet.base.strategy.collective_fields import CONFIGS
    from torchfleet.collective.strategies.sharding.units import MAX_SHARE, Units

    megabytes: float = CONFIGS["sharding"]["segment_broadcast_MB"].default
    sizes: list[int] = []
    seen: set[torch.nn.Parameter] = set()
    for unit in Units(model, megabytes * (1 << 20), max_share=MAX_SHARE).find():
        own = {parameter for module in unit for parameter in module.parameters()} - seen
        sizes.append(sum(parameter.nbytes for parameter in own))
        seen |= own
    return max(sizes[:-1], default=0), sizes[-1]  # the model itself is the last


def plans(size: ModelSize, ranks: int, optimizer: str) -> Iterator[RankPlan]:
    """Strategies in the order in which one tries them."""
    own, state, acts = size.parameters, STATES[optimizer] * size.parameters, size.activations
    around = own * (ranks - 1) / ranks
    rest = size.frozen + (2 * own + state) / ranks
    yield RankPlan("data parallelism", size.frozen + 2 * own + state, 0, acts, 2 * around)
    yield RankPlan("sharding, stage 1", size.frozen + 2 * own + state / ranks, 0, acts, 3 * around)
    if ranks == 1:  # nothing is gathered
        size = replace(size, largest=0, outside=0)
    share = _uncovered(acts, own)
    whole = own * (ranks > 1) + size.largest * (1 + share)
    yield RankPlan("sharding, stage 2", rest, whole, acts, 2 * around)
    yield RankPlan("sharding, stage 3", rest, _gathered(size, acts), acts, 3 * around)
    part = acts / ranks
    yield RankPlan("stage 3, context_parallel", rest, _gathered(size, part), part, 3 * around)


def _gathered(size: ModelSize, activations: float) -> float:
    """The most bytes of gathered parameters and their gradients on a rank under stage 3."""
    share = _uncovered(activations, size.parameters)
    return size.largest * (3 + share) + size.outside * (1 + share)


def _uncovered(activations: float, parameters: int) -> float:
    """s: the share of a unit's gradients that the unit's activations, which are freed before, do not make room for."""
    return max(0.0, 1 - activations / parameters) if parameters else 0.0
