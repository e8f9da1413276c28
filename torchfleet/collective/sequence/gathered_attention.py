"""Attention over a sequence that is cut over ranks, on CPUs: keys and values of all ranks are gathered, queries stay.

    o_i = Σ_j softmax_j(q_i · k_j · scale) v_j        i: tokens of this rank, j: tokens of all ranks (causal: j ≤ i)

torch's ring attention has no kernel for CPUs: it takes over the flash, efficient and cuDNN kernels of GPUs. This calls
torch's flash kernel for CPUs itself. Under a causal mask each half of the queries is a chunk of the sequence: it
attends to all chunks before its own, and causally to its own. The two results are joined by their logarithms of sums of
exponentials. No matrix of scores is kept. Gathered keys and values are freed after forward, and gathered again in
backward; the gradients of keys and values are reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from torchfleet.collective.sequence.parts import add_to_parts, gathered, in_order, own_sum
from torchfleet.collective.world import Axis

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_TOKENS = 2  # the dimension of tokens in (batch, heads, tokens, width)


class _Piece(NamedTuple):
    """Queries [start, stop) of this rank attend to keys [first, last) of the sequence."""

    start: int
    stop: int
    first: int
    last: int
    is_causal: bool


def _pieces(num: int, axis: Axis, is_causal: bool) -> Iterator[_Piece]:
    """The calls of the kernel for `num` queries of this rank."""
    if not is_causal:
        yield _Piece(0, num, 0, num * axis.size, False)
        return
    chunk = num // 2
    for half, index in enumerate((axis.rank, 2 * axis.size - 1 - axis.rank)):
        start = half * chunk
        yield _Piece(start, start + chunk, index * chunk, (index + 1) * chunk, True)
        if index:
            yield _Piece(start, start + chunk, 0, index * chunk, False)


class GatheredAttention(torch.autograd.Function):
    """`query`, `key`, `value`: (batch, heads, tokens of this rank, width), in the parts of parts.py."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool,
        scale: float | None,
        axis: Axis,
    ) -> torch.Tensor:
        keys, values = _whole(key, value, axis)
        output = torch.zeros_like(query, dtype=torch.float32)
        sums = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
        for piece in _pieces(query.shape[_TOKENS], axis, is_causal):
            found, logs = _attend(
                query[:, :, piece.start : piece.stop],
                keys[:, :, piece.first : piece.last],
                values[:, :, piece.first : piece.last],
                0.0,
                piece.is_causal,
                scale=scale,
            )
            _join(output[:, :, piece.start : piece.stop], sums[:, :, piece.start : piece.stop], found, logs)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.options = (is_causal, scale, axis)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, output, sums = ctx.saved_tensors
        is_causal, scale, axis = ctx.options
        keys, values = _whole(key, value, axis)
        of_queries = torch.zeros_like(query, dtype=torch.float32)
        parts = key.new_zeros((axis.size, 2, *key.shape), dtype=torch.float32)  # gradients of keys and values, by rank
        for piece in _pieces(query.shape[_TOKENS], axis, is_causal):
            own, others = slice(piece.start, piece.stop), slice(piece.first, piece.last)
            found: Any = _attend_backward(
                gradients[0][:, :, own],
                query[:, :, own],
                keys[:, :, others],
                values[:, :, others],
                output[:, :, own],
                sums[:, :, own],
                0.0,
                piece.is_causal,
                scale=scale,
            )
            of_queries[:, :, own] += found[0]
            for which in (0, 1):
                add_to_parts(parts[:, which], found[1 + which], piece.first, _TOKENS)
        del keys, values, found
        own_keys, own_values = own_sum(parts, axis).to(key.dtype)
        return of_queries.to(query.dtype), own_keys, own_values, None, None, None


def _whole(key: torch.Tensor, value: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence, in its order; one exchange."""
    both = in_order(gathered(torch.stack([key, value]), axis), 1 + _TOKENS)
    return both[0], both[1]


def _join(output: torch.Tensor, sums: torch.Tensor, found: torch.Tensor, logs: torch.Tensor) -> None:
    """Add attention to further keys in place. `sums`, `logs`: logarithms of sums of exponentials of scores."""
    total = torch.logaddexp(sums, logs)
    output.mul_((sums - total).exp().unsqueeze(-1)).add_(found * (logs - total).exp().unsqueeze(-1))
    sums.copy_(total)
