"""Which tokens of a sequence a rank has: 2n chunks of equal length, of which rank r of n has chunks r and 2n-1-r.

In causal attention a token attends to all tokens before it, so that late chunks are more work than early ones; an early
and a late one together are the same work on every rank (as in torch's context_parallel).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torchfleet.collective.layers.row_gathering import all_gather_single, reduce_scatter_single
from torchfleet.collective.world import Axis


def part(tensor: torch.Tensor, axis: Axis, dim: int = 1) -> torch.Tensor:
    """This rank's tokens of a tensor that has all of them along `dim`."""
    chunks = tensor.chunk(2 * axis.size, dim)
    return torch.cat([chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]], dim)


def gathered(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`tensor` of every rank: a new first dimension, in the order of the ranks."""
    assert axis.group is not None
    found = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    all_gather_single(found, tensor.contiguous(), group=axis.group)
    return found.view(axis.size, *tensor.shape)


def in_order(of_ranks: torch.Tensor, dim: int) -> torch.Tensor:
    """Parts of all ranks along the first dimension, joined in the order of the sequence along `dim` of a part."""
    halves = [part.chunk(2, dim) for part in of_ranks]
    return torch.cat([*(half[0] for half in halves), *(half[1] for half in reversed(halves))], dim)


def add_to_parts(of_ranks: torch.Tensor, tensor: torch.Tensor, first: int, dim: int) -> None:
    """Add `tensor`, whole chunks of the sequence from token `first` on, to the parts of the ranks that have them.

    `of_ranks` has parts along its first dimension; `dim`: of the tokens, in a part.
    """
    size, chunk = of_ranks.shape[0], of_ranks.shape[1 + dim] // 2
    for index, piece in enumerate(tensor.split(chunk, dim), first // chunk):  # type: ignore[no-untyped-call]
        rank, half = (index, 0) if index < size else (2 * size - 1 - index, 1)
        of_ranks[rank].narrow(dim, half * chunk, chunk).add_(piece)


def own_sum(of_ranks: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over ranks of this rank's part, one of the parts along the first dimension."""
    own = of_ranks.new_empty(of_ranks.shape[1:])
    reduce_scatter_single(own, of_ranks.flatten(0, 1), group=axis.group)
    return own


class WholeOutput(torch.autograd.Function):
    """The tokens of all ranks along dimension 1; in backward, this rank's tokens times the number of ranks.

    Every rank computes the same loss from it. The ranks' gradients are averaged afterwards, and must be summed: hence
    the factor.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return in_order(gathered(tensor, axis), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return part(gradients[0], ctx.axis) * ctx.axis.size, None
