"""Attention over a sequence that is cut over ranks, on GPUs: torch's ring attention.

Queries stay; keys and values go round, or are gathered, as torch chooses. The kernels are flash, efficient or cuDNN
attention, whose backward passes torch's dispatcher of DTensors takes over too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.collective.world import Axis

_TOKENS = 2  # the dimension of tokens in (batch, heads, tokens, width)


class RingAttention:
    """torch's ring attention among the ranks of `axis`. All of a model's attention is causal, or none of it."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        """Raises StrategyError if torch or the backend does not support it."""
        self._torch = _of_torch()
        assert axis.group is not None
        if dist.get_backend(axis.group) != "nccl":
            raise StrategyError(
                f"context_parallel on GPUs needs NCCL, found {dist.get_backend(axis.group)}: over gloo the collectives "
                "of torch's ring attention do not take tensors on GPUs. Let fleet.init make the process group, with "
                "one rank a GPU."
            )
        self._mesh = DeviceMesh.from_group(axis.group, device.type)
        self._is_causal: bool | None = None
        self._torch._enable_cp_dtensor_dispatcher()

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        if self._is_causal not in (None, is_causal):  # torch has one setting for the whole process
            raise ModelError(
                "context_parallel: some attention of the model is causal and some is not, which torch's ring attention "
                "does not take. Leave context_parallel out."
            )
        self._is_causal = self._torch._cp_options.enable_load_balance = is_causal
        cut: list[Any] = [DTensor.from_local(each, self._mesh, [Shard(_TOKENS)]) for each in (query, key, value)]
        attend: Any = torch.nn.functional.scaled_dot_product_attention
        output = attend(*cut, is_causal=is_causal, scale=scale)
        own: torch.Tensor = output.to_local()
        return own


@cache
def _of_torch() -> Any:
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError:
        raise StrategyError(
            "context_parallel on GPUs needs the ring attention of torch 2.10 or newer, found torch "
            f"{torch.__version__}: take a newer torch, or leave context_parallel out"
        ) from None
    return _attention
