"""Selection of the largest values of a gradient, and the residuals that are kept for later steps (dgc.py)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

_SAMPLE = 1 << 14  # smallest sample for the estimate of the bound
_SAMPLED = 64  # largest distance between sampled values


def num_sent(num_values: int, sparsity: float) -> int:
    """How many of a parameter's values are sent; equal on all ranks."""
    share = round(num_values * (1.0 - sparsity), 6)  # 1 - 0.999 is not quite 0.001, and must not cost one value more
    return min(num_values, max(1, math.ceil(share)))


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the `count` largest absolute values, exactly, unordered; `values` is flat. NaN counts as largest.

    On a CPU torch.topk passes over all values and their indices in one thread. Here a sample yields a bound that
    somewhat more than `count` values should exceed, and only these are compared; if fewer do, all values are.
    """
    sizes = values.abs()
    if values.is_cuda or count * 4 > sizes.numel() or sizes.numel() < 4 * _SAMPLE:
        return _top(sizes, count)
    bound = _bound(sizes, count)
    if bound == 0:
        return _largest_of_few(sizes, count)
    candidates = _places(~(sizes.numpy() < bound))  # not >=, which is False for NaN
    if candidates.numel() < count:
        return _top(sizes, count)
    return candidates[_top(sizes[candidates], count)]


def _top(sizes: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(sizes, count, sorted=False).indices


def _bound(sizes: torch.Tensor, count: int) -> float:
    """A bound, estimated from a sample, that `count` values reach, with a margin of four standard deviations."""
    step = min(_SAMPLED, sizes.numel() // _SAMPLE) | 1  # odd, to differ from layer widths that are powers of 2
    sample = sizes[::step]
    expected = count / step
    rank = math.ceil(expected + 4 * math.sqrt(expected)) + 4
    return float(torch.topk(sample, min(rank, sample.numel()), sorted=False).values.min())


def _largest_of_few(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """`_top` if most values are 0, as in the gradients of embeddings."""
    candidates = _places(sizes.numpy() != 0)
    missing = count - candidates.numel()
    if missing <= 0:
        return candidates[_top(sizes[candidates], count)]
    # Of the first `count` values at most count - missing are not 0.
    zeros = _places(sizes[:count].numpy() == 0)[:missing]
    return torch.cat([candidates, zeros])


def _places(mask: npt.NDArray[np.bool_]) -> torch.Tensor:
    """The indices where the mask is true. numpy is many times faster at it on a CPU than torch."""
    return torch.from_numpy(np.flatnonzero(mask))


class Residual:
    """What one rank has not sent of a parameter: the velocity u and the sum of velocities v.

    Both have the parameter's shape, and at least float32; `flat` views them in memory order.
    """

    def __init__(self, velocity: torch.Tensor, unsent: torch.Tensor) -> None:
        self.velocity, self.unsent = velocity, unsent

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Residual:
        return cls(_zeros(parameter), _zeros(parameter))

    def add(self, gradient: torch.Tensor, momentum: float) -> None:
        """u = momentum · u + g and v = v + u: momentum is applied before values are held back, not after."""
        velocity = flat(self.velocity)
        torch.add(gradient, velocity, alpha=momentum, out=velocity)
        flat(self.unsent).add_(velocity)

    def take(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` largest values of v and their indices; they become 0 in v, and in u (momentum factor masking)."""
        unsent = flat(self.unsent)
        indices = largest(unsent, count)
        values = unsent[indices]
        unsent.index_fill_(0, indices, 0.0)
        flat(self.velocity).index_fill_(0, indices, 0.0)
        return values, indices


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view of all values in memory order, which is their order in a bucket of gradients."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not _is_dense(tensor):
        return tensor.reshape(-1)  # a copy; buckets have contiguous views of these
    return tensor.as_strided((tensor.numel(),), (1,))


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    layout = torch.preserve_format if _is_dense(parameter) else torch.contiguous_format
    return torch.zeros_like(parameter, dtype=dtype, memory_format=layout, requires_grad=False)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values fill their memory without gaps, in any order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
