"""First values of rows, in plain torch: bit-equal to kernels/random.py, by the same operations in the same order."""

from __future__ import annotations

import torch

from torchfleet.ps.gpu.integers import mix, shift_right, signed
from torchfleet.ps.kernels import random
from torchfleet.ps.tables.settings.spec import Initializer

_GOLDEN = signed(0x9E3779B97F4A7C15)


def first_values(keys: torch.Tensor, stream: int, initializer: Initializer, dim: int) -> torch.Tensor:
    """(len(keys), dim) float32 of a table whose stream (row_form.value_stream) is given as a signed integer."""
    if initializer.name == "constant":
        return torch.full((len(keys), dim), initializer.a, dtype=torch.float32, device=keys.device)
    base = mix(mix(keys + _GOLDEN) + stream)
    counters = torch.arange(1, dim + 1, dtype=torch.int64, device=keys.device) * _GOLDEN
    bits = shift_right(mix(base[:, None] + counters), 11)
    uniform = ((bits.double() + 0.5) * 1.1102230246251565e-16).clamp(max=0.9999999999999999)
    a, b = initializer.a, initializer.b
    if initializer.name == "uniform":
        return (uniform * (b - a) + a).float()
    if initializer.name == "truncated_normal":
        uniform = uniform * (1.0 - 2.0 * random._CUT) + random._CUT
    return (normal_quantile(uniform) * b + a).float()


def normal_quantile(p: torch.Tensor) -> torch.Tensor:
    """As kernels/random.normal_quantile."""
    q = p - 0.5
    centre = q * _ratio(random._CENTRE.tolist(), 0.180625 - q * q)
    r = torch.sqrt(-_log(torch.where(q < 0.0, p, 1.0 - p)))
    tail = torch.where(r <= 5.0, _ratio(random._TAIL.tolist(), r - 1.6), _ratio(random._FAR_TAIL.tolist(), r - 5.0))
    return torch.where(q.abs() <= 0.425, centre, torch.where(q < 0.0, -tail, tail))


def _ratio(terms: list[list[float]], x: torch.Tensor) -> torch.Tensor:
    above, below = torch.full_like(x, terms[7][0]), torch.full_like(x, terms[7][1])
    for over, under in terms[6::-1]:
        above, below = above * x + over, below * x + under
    return above / below


def _log(x: torch.Tensor) -> torch.Tensor:
    part, exponent = torch.frexp(x)
    is_low = part < 0.7071067811865476
    part, exponent = torch.where(is_low, part * 2.0, part), torch.where(is_low, exponent - 1, exponent)
    s = (part - 1.0) / (part + 1.0)
    square, total = s * s, torch.zeros_like(x)
    for k in range(23, 0, -2):
        total = total * square + 1.0 / k
    return s * 2.0 * total + exponent.double() * random._LN2
