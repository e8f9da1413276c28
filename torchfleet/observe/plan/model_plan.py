"""`fleet plan --model`: memory and time of a rank in collective training, by strategy, before anything runs.

With Ψ bytes of parameters, as many of gradients, K of optimizer state and A of activations, on n ranks:

                              at rest        in a step       exchanged
    data parallelism          2Ψ + K         A               2Ψ (n-1)/n
    sharding, stage 1         2Ψ + K/n       A               3Ψ (n-1)/n
    sharding, stage 2         (2Ψ + K)/n     Ψ + A           2Ψ (n-1)/n
    sharding, stage 3         (2Ψ + K)/n     U + A           3Ψ (n-1)/n      U: the parameters of the largest block
    stage 3, context_parallel (2Ψ + K)/n     U + A/n         3Ψ (n-1)/n, and keys and values

The model is made and called on torch's meta device: no memory is taken and nothing is computed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchfleet.base.errors import ModelError

if TYPE_CHECKING:
    import torch

STATES = {"sgd": 0, "momentum": 1, "adam": 2}  # optimizer → tensors of a parameter's size and type
_BACKWARD = 3.0  # forward and backward are as many products as three forwards


@dataclass(frozen=True)
class ModelSize:
    """Bytes and operations of a model and one batch."""

    parameters: int  # trained ones
    frozen: int  # other parameters, and buffers
    largest: int  # the trained parameters of the largest block, which stage 3 gathers at once
    activations: int  # what forward keeps for backward; 0: the inputs are not known
    flops: float  # of forward and backward


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and exchanges under a strategy."""

    strategy: str
    state_bytes: float  # parameters, gradients, optimizer state, at rest
    gathered_bytes: float  # parameters of other ranks, in a step
    activation_bytes: float
    exchanged_bytes: float  # in a step

    @property
    def bytes(self) -> float:
        return self.state_bytes + self.gathered_bytes + self.activation_bytes


def size_of(path: str) -> ModelSize:
    """The size of what `module:function` makes: a model, or a model and the tuple of its inputs."""
    import torch

    with torch.device("meta"):
        made = _function(path)()
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"--model {path}: expected a torch.nn.Module, or (model, inputs), found {type(made).__name__}")
    kept, flops = (0, 0.0) if inputs is None else _traced(model, inputs)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    every = [*model.parameters(), *model.buffers()]
    own = sum(tensor.nbytes for tensor in every if id(tensor) in trained)
    return ModelSize(own, sum(tensor.nbytes for tensor in every) - own, _largest(model), kept, flops)


def _function(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not look there, as python -m does
        sys.path.append(os.getcwd())
    try:
        found: Callable[[], Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"--model {path}: expected module:function, such as train:make_model, in this folder or one of PYTHONPATH: "
            f"{error}"
        ) from None
    return found


def _largest(model: torch.nn.Module) -> int:
    """Bytes of the largest module of a list, which is gathered at once; of a model without lists, the largest layer."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))]
    blocks = [child for each in lists for child in each] or [module for module in model.modules() if module._parameters]
    return max((sum(p.nbytes for p in block.parameters()) for block in blocks), default=0)


def _traced(model: torch.nn.Module, inputs: Any) -> tuple[int, float]:
    """Bytes that forward keeps for backward, beside parameters, and operations of a step."""
    from torch.utils.flop_counter import FlopCounterMode

    from torchfleet.collective.tensors.kept_tensors import bytes_in, kept_for_backward

    own = [*model.parameters(), *model.buffers()]
    with FlopCounterMode(display=False) as counter, kept_for_backward(own) as kept:
        outputs = model(*(tensor.to("meta") for tensor in inputs))
    del outputs
    return bytes_in(kept.values()), _BACKWARD * float(counter.get_total_flops())


def plans(size: ModelSize, ranks: int, optimizer: str) -> Iterator[RankPlan]:
    """Strategies in the order in which one tries them."""
    own, state, acts = size.parameters, STATES[optimizer] * size.parameters, size.activations
    around = own * (ranks - 1) / ranks
    whole, unit = (own, size.largest) if ranks > 1 else (0, 0)
    rest = size.frozen + (2 * own + state) / ranks
    yield RankPlan("data parallelism", size.frozen + 2 * own + state, 0, acts, 2 * around)
    yield RankPlan("sharding, stage 1", size.frozen + 2 * own + state / ranks, 0, acts, 3 * around)
    yield RankPlan("sharding, stage 2", rest, whole, acts, 2 * around)
    yield RankPlan("sharding, stage 3", rest, unit, acts, 3 * around)
    yield RankPlan("stage 3, context_parallel", rest, unit, acts / ranks, 3 * around)
