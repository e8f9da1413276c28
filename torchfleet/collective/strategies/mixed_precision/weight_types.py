"""The precision in which amp uses the weights of a layer, so that sharding can gather them in it.

autocast casts the weights of linear and convolutional layers, and autograd keeps the casts until backward. Weights that
are gathered in half precision need no cast, and are freed after forward. The values are the same.
"""

from __future__ import annotations

import torch

from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.mixed_precision.op_lists import PADDLE
from torchfleet.collective.strategies.mixed_precision.precision import precision

# Layers whose parameters are only inputs of functions that autocast runs in half precision, and those functions.
_CAST: tuple[tuple[type[torch.nn.Module], tuple[str, ...]], ...] = (
    (torch.nn.Linear, ("linear", "matmul", "addmm", "mm")),
    (torch.nn.modules.conv._ConvNd, ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
                                     "conv_transpose3d")),
    (torch.nn.MultiheadAttention, ("linear", "multi_head_attention_forward")),
)  # fmt: skip
# Packages whose layers pass weights on as they are, and the names that these layers give them.
_KNOWN = ("torch", "torchao", "torchfleet")
_NAMES = {"weight", "bias", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight",
          "bias_k", "bias_v"}  # fmt: skip


class WeightTypes:
    """Returns the dtype of a module's own parameters in forward, given the dtype in which they are kept.

    It is half precision for layers whose forward, which is torch's, casts these parameters before anything else. Layers
    that compute something of their own from them (subclasses with a forward, weight_norm) see what is kept.
    """

    def __init__(self, settings: DistributedStrategy) -> None:
        self._dtype = precision(settings.amp_configs)[0] if settings.amp else None
        self._black = {PADDLE.get(name, name) for name in settings.amp_configs.custom_black_list}

    def __call__(self, module: torch.nn.Module, kept: torch.dtype) -> torch.dtype:
        if self._dtype is None or kept != torch.float32:
            return kept
        for layer, functions in _CAST:
            if isinstance(module, layer) and self._black.isdisjoint(functions) and _has_known_forward(module):
                return self._dtype
        is_half = _is_conv1d(module) and self._black.isdisjoint(("addmm", "mm", "matmul"))
        return self._dtype if is_half else kept


def _has_known_forward(module: torch.nn.Module) -> bool:
    """Whether the module's forward passes its parameters on as they are."""
    owner = type(module).forward.__module__.partition(".")[0]
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return owner in _KNOWN and own <= _NAMES


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether it is the linear layer of Hugging Face's GPT-2, which calls addmm. By name: nothing is imported here."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
