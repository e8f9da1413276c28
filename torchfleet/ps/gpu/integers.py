"""64-bit unsigned arithmetic on torch's signed tensors: products and sums wrap around as they should, shifts do not.

The twin of kernels/hashing.py.
"""

from __future__ import annotations

import torch

_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def signed(number: int) -> int:
    """The signed 64-bit integer with the bits of an unsigned one."""
    return number - (1 << 64) if number >> 63 else number


def shift_right(x: torch.Tensor, num: int) -> torch.Tensor:
    """x >> num of unsigned numbers."""
    return (x >> num) & ((1 << (64 - num)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """As kernels/hashing.mix, in a new int64 tensor."""
    x = (x ^ shift_right(x, 30)) * signed(_M1)
    x = (x ^ shift_right(x, 27)) * signed(_M2)
    return x ^ shift_right(x, 31)
