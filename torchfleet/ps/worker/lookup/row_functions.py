"""The autograd functions of lookups: rows as they are, and rows pooled over bags.

`weight` only ties a lookup into the graph. Backward leaves the gradients in the BatchRows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchfleet.ps.kernels import lookup, pooling
from torchfleet.ps.kernels.rows import gather
from torchfleet.ps.kernels.team import TEAM
from torchfleet.ps.worker.batch.bags import Bags
from torchfleet.ps.worker.client.shard import Floats
from torchfleet.ps.worker.lookup.batch_rows import BatchRows, Index
from torchfleet.ps.worker.lookup.device_copies import host_tensor, to_device, to_host

_FEWEST_IDS = 8192  # that a thread gets


def pooled(weight: torch.Tensor, rows: BatchRows, index: Index, bags: Bags) -> torch.Tensor:
    """Rows pooled over bags: shape (samples, slots, dim)."""
    if bags.pooling == "max":
        out = MaxLookup.apply(weight, rows, index, bags)  # type: ignore[no-untyped-call]
    elif bags.weights is not None or bags.by_freq:
        weights = torch.ones(len(index)) if bags.weights is None else bags.weights
        out = WeightedLookup.apply(weight, rows, index, bags, weights)  # type: ignore[no-untyped-call]
    else:
        out = PooledLookup.apply(weight, rows, index, bags)  # type: ignore[no-untyped-call]
    found: torch.Tensor = out
    return found


class Lookup(torch.autograd.Function):
    """Values of rows."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: BatchRows, index: Index) -> torch.Tensor:
        ctx.rows, ctx.index = rows, index
        out = host_tensor((len(index), rows.dim), weight.device)
        gather(rows.values.reshape(-1), rows.dim, 0, index, out.numpy())
        return to_device(out, weight.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.rows.add(ctx.index, grads[0])
        return None, None, None


class PooledLookup(torch.autograd.Function):
    """Sums or means of rows over bags."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: BatchRows, index: Index, bags: Bags) -> torch.Tensor:
        ctx.rows, ctx.index, ctx.bags = rows, index, bags
        out = _new(weight, rows, bags)
        values, flat = rows.values.reshape(-1), out.numpy().reshape(-1)
        how = values, rows.dim, index, bags.offsets, bags.num_slots, bags.pooling == "mean", flat
        fewest = max(1, _FEWEST_IDS * len(out) // max(1, len(index)))
        TEAM.share(lambda first, last: lookup.pool(*how, first, last), len(out), fewest)
        return to_device(out, weight.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.rows.add_pooled(ctx.index, ctx.bags, grads[0])
        return None, None, None, None


class WeightedLookup(torch.autograd.Function):
    """Weighted sums of rows over bags; means and sums whose gradients are scaled by an id's frequency. Differentiable
    in the weights too.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: BatchRows, index: Index, bags: Bags, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.rows, ctx.index, ctx.bags, ctx.like = rows, index, bags, weights
        own = to_host(weights).astype(np.float32, copy=False).reshape(-1)
        ctx.weights = own * _shares(bags, index) if bags.pooling == "mean" else own
        out = _new(weight, rows, bags)
        flat, offsets, num_slots = out.numpy().reshape(-1), bags.offsets, bags.num_slots
        pooling.pool_weighted(rows.values.reshape(-1), rows.dim, index, ctx.weights, offsets, num_slots, flat)
        return to_device(out, weight.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        flat, bags = to_host(grads[0]).reshape(-1), ctx.bags
        if ctx.needs_input_grad[0]:
            weights = ctx.weights / _counts(ctx.index) if bags.by_freq else ctx.weights
            ctx.rows.add_weighted(ctx.index, bags, weights, flat)
        if not ctx.needs_input_grad[4]:
            return None, None, None, None, None
        found = np.empty(len(ctx.index), np.float32)
        values = ctx.rows.values.reshape(-1)
        pooling.weight_gradients(flat, values, ctx.rows.dim, ctx.index, bags.offsets, bags.num_slots, found)
        return None, None, None, None, torch.from_numpy(found).view(ctx.like.shape).to(ctx.like)


class MaxLookup(torch.autograd.Function):
    """Elementwise maximum of rows over bags."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: BatchRows, index: Index, bags: Bags) -> torch.Tensor:
        out = _new(weight, rows, bags)
        ctx.rows, ctx.winners = rows, np.empty(out.numel(), np.int32)
        flat, values = out.numpy().reshape(-1), rows.values.reshape(-1)
        pooling.pool_max(values, rows.dim, index, bags.offsets, bags.num_slots, flat, ctx.winners)
        return to_device(out, weight.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.rows.add_largest(ctx.winners, to_host(grads[0]).reshape(-1))
        return None, None, None, None


def _new(weight: torch.Tensor, rows: BatchRows, bags: Bags) -> torch.Tensor:
    return host_tensor(((len(bags.offsets) - 1) // bags.num_slots, bags.num_slots, rows.dim), weight.device)


def _shares(bags: Bags, index: Index) -> Floats:
    """By id: 1 / the number of ids in its bag, without padding."""
    lengths = np.diff(bags.offsets)
    real = np.concatenate([[0], np.cumsum(index >= 0)])
    num_real = real[bags.offsets[1:]] - real[bags.offsets[:-1]]
    return np.repeat(1.0 / np.maximum(1, num_real), lengths).astype(np.float32)


def _counts(index: Index) -> Floats:
    """By id: the number of times it appears in the lookup."""
    counts = np.bincount(index[index >= 0], minlength=1)
    return np.where(index >= 0, counts[np.maximum(index, 0)], 1).astype(np.float32)
