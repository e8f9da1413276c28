"""Finds the attention in a model's forward and computes it over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchfleet.base.errors import ModelError

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float | None], torch.Tensor]
_ORIGINAL = F.scaled_dot_product_attention
_OTHER_KERNELS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")  # of evaluation


class CutAttention(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention sees all tokens; `num_calls` counts its calls.

    The other functions of torch run as they are: they compute each token by itself, or the model cannot be cut.
    """

    def __init__(self, attention: Attention, length: int) -> None:
        """`length`: tokens of a sequence on this rank."""
        super().__init__()
        self._attention, self._length, self.num_calls = attention, length, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ORIGINAL:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        if getattr(func, "__name__", "") in _OTHER_KERNELS:
            raise ModelError(
                "context_parallel: torch.nn's fused attention of evaluation sees the tokens of one rank. Call "
                "torch.backends.mha.set_fastpath_enabled(False) once, at the start of the script."
            )
        return func(*args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """torch.nn.MultiheadAttention calls a Python function, inside which modes are off: replace attention there."""
        if kwargs.get("need_weights", True):
            raise ModelError(
                "context_parallel: torch.nn.MultiheadAttention is called with need_weights=True, which computes the "
                "weights of all pairs of tokens. Call it with need_weights=False."
            )
        F.scaled_dot_product_attention = self._attend
        try:
            return F.multi_head_attention_forward(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = _ORIGINAL

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        self.num_calls += 1
        self._check(query, key, value, attn_mask, dropout_p)
        if torch.is_autocast_enabled(query.device.type):
            half = torch.get_autocast_dtype(query.device.type)
            query, key, value = (each.to(half) for each in (query, key, value))
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        return self._attention(query, key, value, is_causal, scale)

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
    ) -> None:
        lengths = [each.shape[-2] for each in (query, key, value)]
        found = ""
        if mask is not None:
            found = f"attention with a mask of shape {tuple(mask.shape)}: causal attention and attention to all tokens"
        elif dropout:
            found = f"attention with dropout {dropout}: attention without dropout, set it to 0 in the model; that"
        elif query.dim() != 4 or lengths != [self._length] * 3 or value.shape[-1] != query.shape[-1]:
            shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
            found = f"attention of shapes {shapes}: (batch, heads, {self._length}, width) of one width"
        if found:
            what, _, can = found.partition(": ")
            raise ModelError(f"context_parallel: found {what}; {can} can be cut. Or leave context_parallel out.")
