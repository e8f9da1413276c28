"""custom_white_list and custom_black_list of amp: functions that compute in another precision than torch chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from torchfleet.errors import StrategyError

# What Paddle calls by another name.
_PADDLE = {"matmul_v2": "matmul", "elementwise_add": "add", "elementwise_mul": "mul",
           "elementwise_sub": "sub", "elementwise_div": "div", "reduce_sum": "sum", "reduce_mean": "mean",
           "softmax_with_cross_entropy": "cross_entropy", "lookup_table_v2": "embedding"}  # fmt: skip


class OpLists(TorchFunctionMode):
    """While it is entered, functions named in `white` get floating inputs in `dtype`, those in `black` in float32.

    Names are those of torch, torch.nn.functional and torch.Tensor ("softmax", "linear", "conv2d", "matmul").
    """

    def __init__(self, white: Sequence[str], black: Sequence[str], device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._white, self._black = _names("custom_white_list", white), _names("custom_black_list", black)
        both = sorted(self._white & self._black)
        if both:
            raise StrategyError(
                f"amp_configs: '{both[0]}' is in custom_white_list and in custom_black_list: leave it in one of them"
            )
        self._device, self._dtype = device, dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in self._black:
            dtype = torch.float32
        elif name in self._white:
            dtype = self._dtype
        else:
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            return func(*_cast(args, dtype), **_cast(kwargs, dtype))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return tree_map(
        lambda tensor: tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype in kinds else tensor,
        values,
    )


def _names(option: str, names: Sequence[str]) -> set[str]:
    for name in names:
        if not isinstance(name, str):
            raise StrategyError(f"amp_configs['{option}'] expects names of functions, found {name!r}")
        own = _PADDLE.get(name, name)
        if not any(callable(getattr(place, own, None)) for place in (torch.nn.functional, torch, torch.Tensor)):
            raise StrategyError(
                f"amp_configs['{option}']: no function '{name}' in torch, torch.nn.functional or torch.Tensor; "
                "names are like 'softmax', 'linear', 'conv2d', 'matmul'"
            )
    return {_PADDLE.get(name, name) for name in names}
