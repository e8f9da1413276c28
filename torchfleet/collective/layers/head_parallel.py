"""torch.nn.MultiheadAttention with heads sharded over ranks, for self-attention in models that do not change.

in_proj_weight has query, key and value one above the other, (3·dim, dim). It is cut into consecutive rows, as a DTensor
is, so that saves have one piece per rank; `own_blocks` then gives each rank the outputs of its own heads.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchfleet.base.errors import ModelError
from torchfleet.collective.layers.cutting import cut_parameters
from torchfleet.collective.layers.parallel_random import parallel_random
from torchfleet.collective.layers.shards import Group, copied, own_blocks, own_shard, summed


class Heads(ParallelStyle):
    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, torch.nn.MultiheadAttention)
        plain = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
        if not (plain and module.batch_first):
            raise ModelError(
                "tensor_parallel: 'heads' cuts a MultiheadAttention with batch_first=True, and without kdim, vdim, "
                "add_bias_kv and add_zero_attn"
            )
        cut_parameters(module, device_mesh, {"in_proj_weight": Shard(0), "in_proj_bias": Shard(0)})
        cut_parameters(module.out_proj, device_mesh, {"weight": Shard(1), "bias": Replicate()})
        group = device_mesh.get_group()

        def forward(
            self: torch.nn.MultiheadAttention,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            key_padding_mask: torch.Tensor | None = None,
            need_weights: bool = True,
            attn_mask: torch.Tensor | None = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[torch.Tensor, None]:
            if not (query is key is value) or key_padding_mask is not None or need_weights:
                raise ModelError(
                    "tensor_parallel: a MultiheadAttention with 'heads' attends to its own input, without "
                    "key_padding_mask and with need_weights=False"
                )
            return _attended(self, query, attn_mask, is_causal, group), None

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


def _attended(
    module: torch.nn.MultiheadAttention, x: torch.Tensor, mask: Any, is_causal: bool, group: Group
) -> torch.Tensor:
    bias = None if module.in_proj_bias is None else own_shard(module.in_proj_bias)
    rows = F.linear(copied(x, group), own_shard(module.in_proj_weight), bias)
    own = own_blocks(rows, 3, group).reshape(*x.shape[:-1], 3, module.num_heads // group.size(), module.head_dim)
    query, key, value = (part.transpose(1, 2) for part in own.unbind(2))
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # True in MultiheadAttention: not attended to
    dropped = module.dropout if module.training else 0.0
    with parallel_random():
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropped, is_causal and mask is None)
    whole = summed(F.linear(mixed.transpose(1, 2).flatten(2), own_shard(module.out_proj.weight)), group)
    return whole if module.out_proj.bias is None else whole + own_shard(module.out_proj.bias)
