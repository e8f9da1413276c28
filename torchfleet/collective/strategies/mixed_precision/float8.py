"""Linear layers that multiply in float8: amp_configs={"dtype": "float8"}.

torchao's Float8Linear takes the place of torch.nn.Linear; parameters, names and saves stay as they are. The three
products of a layer (output, gradient of the input, gradient of the weight) have operands in float8: inputs and weights
in e4m3, gradients of outputs in e5m2. Each tensor is first scaled by its own largest value:

    q(t) = round(t · s) / s      s = 448 / max|t| for e4m3, 57344 / max|t| for e5m2
    y = q(x) · q(W)ᵀ + b         sums in float32, y in bfloat16

Everything else is amp in bfloat16. A number has a mantissa of 3 (e4m3) or 2 (e5m2) bits: an operand is off by at
most 1/16 or 1/8 of its value. Tensor cores multiply in tiles of 16: a layer with another number of features stays in
bfloat16, and rows are padded with zeros.

Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.extras import required
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.module_names import matching
from torchfleet.collective.strategies.fusion import COMPILING
from torchfleet.collective.strategies.mixed_precision.op_lists import PADDLE

_USER = "amp_configs: dtype='float8'"
_CAPABILITY = (8, 9)  # of Ada; Hopper has 9.0
_TILE = 16
_NUM_NAMED = 8  # layers that the report names
_LINEAR = {"linear", "matmul", "addmm", "mm"}


class Float8Layers:
    """Replaces the linear layers of a model. Raises StrategyError if the settings or the device do not allow it."""

    def __init__(self, settings: DistributedStrategy, device: torch.device) -> None:
        _check(settings)
        check_device(device)
        self._torchao = required("torchao.float8", _USER, "fp8")
        self._is_compiled = any(getattr(settings.build_strategy, name) for name in COMPILING)
        self._excluded: Sequence[str] = settings.amp_configs.float8_exclude
        self.num_converted = 0
        self.left: dict[str, str] = {}  # name of a layer that stays in bfloat16 → the reason

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its linear layers in float8; a new module if the model itself is a linear layer."""
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
        excluded = {
            name
            for pattern in self._excluded
            for name in matching(pattern, layers, "amp_configs['float8_exclude'], among linear layers")
        }
        self.left = {
            name: "excluded" if name in excluded else reason
            for name, layer in layers.items()
            if name in excluded or (reason := _obstacle(layer))
        }
        self.num_converted = len(layers) - len(self.left)
        if not self.num_converted:
            raise ModelError(f"{_USER}: the model has no linear layer that it could use. {self.report()}")
        kept = {id(layers[name]) for name in self.left}

        def is_converted(layer: torch.nn.Module, _: str) -> bool:
            return id(layer) not in kept

        made: torch.nn.Module = self._torchao.convert_to_float8_training(
            model, module_filter_fn=is_converted, config=float8_config(self._torchao)
        )
        return made

    def report(self) -> str:
        """How many layers multiply in float8, which do not, and why. If the model is not compiled, also says that its
        casts cost more than float8 gains.
        """
        num = self.num_converted + len(self.left)
        words = f"amp: {self.num_converted} of {num} linear layers multiply in float8"
        if not self._is_compiled:
            words += ", slower than in bfloat16, because build_strategy does not compile the model"
        if not self.left:
            return words
        named = [f"{name or 'the model'} ({reason})" for name, reason in self.left.items()]
        more = f" and {len(named) - _NUM_NAMED} more" if len(named) > _NUM_NAMED else ""
        return f"{words}; in bfloat16 stay: {', '.join(named[:_NUM_NAMED])}{more}"


def float8_config(torchao: Any) -> Any:
    """One scale for each tensor; rows are padded to tiles, so that a batch may have any number of samples."""
    return torchao.Float8LinearConfig(pad_inner_dim=True)


def check_device(device: torch.device) -> None:
    """Raise StrategyError unless the device multiplies in float8."""
    if device.type == "cuda" and torch.version.cuda is not None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} with {capability[0]}.{capability[1]}"
    else:
        found = f"a job on the {device.type}"
    raise StrategyError(
        f"{_USER} needs an NVIDIA GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher (H100, H200, "
        f"L40, RTX 4090), found {found}. Use dtype='bfloat16'."
    )


def _check(settings: DistributedStrategy) -> None:
    black = [name for name in settings.amp_configs.custom_black_list if PADDLE.get(name, name) in _LINEAR]
    if black:
        raise StrategyError(
            f"{_USER} and '{black[0]}' in custom_black_list contradict each other: linear layers cannot multiply in "
            "float8 and in float32. Name single layers in float8_exclude, or leave one of them out."
        )
    for other in ("tensor_parallel", "pipeline"):
        if getattr(settings, other):
            raise StrategyError(
                f"{_USER} and {other} cannot be used together: the layers are cut or traced as torch's own. Leave one "
                "of them out."
            )


def _obstacle(layer: torch.nn.Linear) -> str:
    """Why a linear layer cannot be converted; "" if it can."""
    from torchfleet.collective.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # imports DTensor

    own = (torch.nn.Linear, ColumnParallelLinear, RowParallelLinear)  # not sharded, because tensor_parallel is off
    if type(layer) not in own:  # a subclass may have a forward of its own, which would be lost
        return f"a {type(layer).__name__}"
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return "has hooks or a forward of its own"
    if layer.in_features % _TILE or layer.out_features % _TILE:
        return f"{layer.in_features} × {layer.out_features}, no multiples of {_TILE}"
    return ""
