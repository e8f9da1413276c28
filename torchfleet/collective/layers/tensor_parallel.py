"""Tensor parallelism: linear layers and embeddings sharded over ranks, which compute one batch together.

    strategy = fleet.DistributedStrategy(tensor_parallel=True, tensor_parallel_configs={"tensor_parallel_degree": 2})
    self.up = fleet.nn.ColumnParallelLinear(d, 4 * d, gather_output=False)
    self.down = fleet.nn.RowParallelLinear(4 * d, d, input_is_parallel=True)

With W = [W_1; W_2] by rows (outputs) a column-parallel layer computes y = [x·W_1ᵀ, x·W_2ᵀ], each rank its shard; with W
= [W_1, W_2] by columns (inputs) a row-parallel layer computes y = x_1·W_1ᵀ + x_2·W_2ᵀ, summed by an all-reduce. A
column-parallel and a row-parallel layer with an elementwise function in between cost one all-reduce forward and one
backward. An embedding is sharded by rows, and the ranks' outputs (zeros for ids of other ranks) are summed.

Before fleet.distributed_model the layers behave like torch's own, with the same initial values, and a model runs in one
process. Then their parameters become DTensors, so that checkpoints, clipping and sharding see the size of the whole.
Sizes that are not divisible by the degree are split as by torch.chunk. Models without such layers are cut by a plan
(plans.py).

All ranks of the model axis read the same batch; ranks along the data and sharding axes read different ones:

    index, number = fleet.data_shard()
    sampler = DistributedSampler(data, num_replicas=number, rank=index)      # number = data × sharding degrees

Source: Shoeybi et al. 2019, Megatron-LM. Composes with data parallelism (whose all-reduce runs during backward,
gradient_average.py), amp, recompute, gradient_merge, sharding and pipeline. To clip by the norm of all gradients call
optimizer.clip_grad_norm_. For dropout of sharded tensors see parallel_random.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from torchfleet.base.errors import ModelError
from torchfleet.collective.layers.cutting import cut_parameters
from torchfleet.collective.layers.shards import copied, gathered, own_shard, split, summed
from torchfleet.collective.tensors.local_tensors import local


class ColumnParallelLinear(torch.nn.Linear):
    """torch.nn.Linear with outputs sharded over ranks; `gather_output=False` leaves each rank its own shard of them."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, gather_output: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.gather_output = gather_output
        self._mesh: DeviceMesh | None = None

    def cut(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        cut_parameters(self, mesh, {"weight": Shard(0), "bias": Shard(0)})

    def stand_in(self) -> torch.nn.Module | None:
        """A replacement for tracing that returns tensors of the same shapes on this rank; None if the layer is not
        sharded."""
        if self._mesh is None:
            return None
        out = self.out_features if self.gather_output else local(self.weight).shape[0]
        return _bare_linear(self, self.in_features, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return super().forward(x)
        group = self._mesh.get_group()
        shard = F.linear(copied(x, group), own_shard(self.weight), _bias(self))
        return gathered(shard, self.out_features, group) if self.gather_output else shard


class RowParallelLinear(torch.nn.Linear):
    """torch.nn.Linear with inputs sharded over ranks; `input_is_parallel`: each rank already has its shard of them."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, input_is_parallel: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.input_is_parallel = input_is_parallel
        self._mesh: DeviceMesh | None = None

    def cut(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        cut_parameters(self, mesh, {"weight": Shard(1), "bias": Replicate()})

    def stand_in(self) -> torch.nn.Module | None:
        """A replacement for tracing that takes tensors of the same shapes on this rank; None if the layer is not
        sharded."""
        if self._mesh is None:
            return None
        into = local(self.weight).shape[1] if self.input_is_parallel else self.in_features
        return _bare_linear(self, into, self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return super().forward(x)
        group = self._mesh.get_group()
        shard = x if self.input_is_parallel else split(x, group)
        whole = summed(F.linear(shard, own_shard(self.weight)), group)
        bias = _bias(self)
        return whole if bias is None else whole + bias


class VocabParallelEmbedding(torch.nn.Embedding):
    """torch.nn.Embedding with rows sharded over ranks."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self._mesh: DeviceMesh | None = None

    def cut(self, mesh: DeviceMesh) -> None:
        rows = math.ceil(self.num_embeddings / mesh.size())
        rank = mesh.get_local_rank()
        self._first, self._past = rows * rank, min(rows * (rank + 1), self.num_embeddings)
        if rows * (mesh.size() - 1) >= self.num_embeddings:
            raise ModelError(
                f"VocabParallelEmbedding: {self.num_embeddings} rows over {mesh.size()} ranks leave a rank without any"
            )
        self._mesh = mesh
        cut_parameters(self, mesh, {"weight": Shard(0)})

    def stand_in(self) -> torch.nn.Module | None:
        """A replacement for tracing that returns tensors of the same shapes; None if the layer is not sharded."""
        if self._mesh is None:
            return None
        return torch.nn.Embedding(self.num_embeddings, self.embedding_dim, device="meta", dtype=self.weight.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return super().forward(ids)
        # The first or the last rank looks up an id that is out of range, so that torch raises its error.
        is_above = ids >= self._first if self._first else torch.ones_like(ids, dtype=torch.bool)
        is_below = ids < self._past if self._past < self.num_embeddings else torch.ones_like(ids, dtype=torch.bool)
        is_own = is_above & is_below
        padding = self.padding_idx
        own_padding = None if padding is None or not self._first <= padding < self._past else padding - self._first
        rows = F.embedding(torch.where(is_own, ids - self._first, 0), own_shard(self.weight), own_padding)
        return summed(rows.masked_fill(~is_own.unsqueeze(-1), 0), self._mesh.get_group())


LAYERS = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


def _bare_linear(layer: torch.nn.Linear, into: int, out: int) -> torch.nn.Module:
    has_bias = layer._parameters["bias"] is not None
    return torch.nn.Linear(into, out, has_bias, device="meta", dtype=layer.weight.dtype)


def _bias(layer: torch.nn.Linear) -> torch.Tensor | None:
    return None if layer._parameters["bias"] is None else own_shard(layer.bias)
