"""LARS and LAMB for many tensors at once on a GPU, in Triton: a pass for the norms, and a pass for the step.

A program works on CHUNK values of one tensor. `addresses` are rows of pointers (weights, gradients, states), one column
for each of `num` tensors; `owners` and `starts` say which tensor a program works on, and which chunk of it. Sums have a
fixed order, so that ranks with the same values get the same sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(addresses, row, num, tensor, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + row * num + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(pointer, at, size, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer + at)
    return tl.load(pointer + at, mask=at < size, other=0.0)


@triton.jit
def _write(pointer, at, values, size, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + at, values)
    else:
        tl.store(pointer + at, values, mask=at < size)


@triton.jit
def total_squares(partials, firsts, counts, squares, num, num_programs, BLOCK: tl.constexpr):
    """squares[k, tensor] = Σ of partials[k] over the tensor's own programs, for k = 0 and 1."""
    tensor = tl.program_id(0)
    first, count = tl.load(firsts + tensor), tl.load(counts + tensor)
    left = tl.zeros([BLOCK], tl.float32)
    right = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        left += tl.load(partials + first + at, mask=at < count, other=0.0)
        right += tl.load(partials + num_programs + first + at, mask=at < count, other=0.0)
    tl.store(squares + tensor, tl.sum(left, 0))
    tl.store(squares + num + tensor, tl.sum(right, 0))


# LAMB: rows weights, gradients, means, variances; settings 1 - β1^t, √(1 - β2^t), weight decay


@triton.jit
def _move(p, m, v, below_m, below_v, eps, decay):
    return (m / below_m) / (tl.sqrt(v) / below_v + eps) + decay * p


@triton.jit
def _lamb_moments(weight, direction, mean, variance, at, size, beta1, rest1, beta2, rest2, FULL: tl.constexpr):
    p = _read(weight, at, size, FULL)
    g = _read(direction, at, size, FULL)
    m = _read(mean, at, size, FULL)
    v = _read(variance, at, size, FULL)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    _write(mean, at, m, size, FULL)
    _write(variance, at, v, size, FULL)
    return p, m, v


@triton.jit
def lamb_moments(
    addresses, settings, sizes, owners, starts, partials, num, num_programs,
    beta1, rest1, beta2, rest2, eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Update m and v; partial sums of p² and r²."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start, size = tl.load(starts + program) * CHUNK, tl.load(sizes + tensor)
    weight, direction = _pointer(addresses, 0, num, tensor, ALIGNED), _pointer(addresses, 1, num, tensor, ALIGNED)
    mean, variance = _pointer(addresses, 2, num, tensor, ALIGNED), _pointer(addresses, 3, num, tensor, ALIGNED)
    below_m, below_v = tl.load(settings + tensor), tl.load(settings + num + tensor)
    decay = tl.load(settings + 2 * num + tensor)
    of_weights = tl.zeros([BLOCK], tl.float32)
    of_moves = tl.zeros([BLOCK], tl.float32)
    if start + CHUNK <= size:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            p, m, v = _lamb_moments(weight, direction, mean, variance, at, size, beta1, rest1, beta2, rest2, True)
            move = _move(p, m, v, below_m, below_v, eps, decay)
            of_weights += p * p
            of_moves += move * move
    else:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            p, m, v = _lamb_moments(weight, direction, mean, variance, at, size, beta1, rest1, beta2, rest2, False)
            move = _move(p, m, v, below_m, below_v, eps, decay)
            of_weights += p * p
            of_moves += move * move
    tl.store(partials + program, tl.sum(of_weights, 0))
    tl.store(partials + num_programs + program, tl.sum(of_moves, 0))


@triton.jit
def _lamb_step(weight, mean, variance, at, size, below_m, below_v, eps, decay, rate, FULL: tl.constexpr):
    p = _read(weight, at, size, FULL)
    m = _read(mean, at, size, FULL)
    v = _read(variance, at, size, FULL)
    _write(weight, at, p - rate * _move(p, m, v, below_m, below_v, eps, decay), size, FULL)


@triton.jit
def lamb_step(
    addresses, settings, sizes, owners, starts, rates, num,
    eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """p = p - rate · r; r is recomputed from m and v, which costs less than storing it."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start, size = tl.load(starts + program) * CHUNK, tl.load(sizes + tensor)
    weight = _pointer(addresses, 0, num, tensor, ALIGNED)
    mean, variance = _pointer(addresses, 2, num, tensor, ALIGNED), _pointer(addresses, 3, num, tensor, ALIGNED)
    below_m, below_v = tl.load(settings + tensor), tl.load(settings + num + tensor)
    decay, rate = tl.load(settings + 2 * num + tensor), tl.load(rates + tensor)
    if start + CHUNK <= size:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            _lamb_step(weight, mean, variance, at, size, below_m, below_v, eps, decay, rate, True)
    else:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            _lamb_step(weight, mean, variance, at, size, below_m, below_v, eps, decay, rate, False)


# LARS: rows weights, gradients, velocities; settings weight decay


@triton.jit
def lars_squares(
    addresses, sizes, owners, starts, partials, num, num_programs,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Partial sums of p² and g²."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start, size = tl.load(starts + program) * CHUNK, tl.load(sizes + tensor)
    weight, direction = _pointer(addresses, 0, num, tensor, ALIGNED), _pointer(addresses, 1, num, tensor, ALIGNED)
    of_weights = tl.zeros([BLOCK], tl.float32)
    of_directions = tl.zeros([BLOCK], tl.float32)
    if start + CHUNK <= size:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            p, g = _read(weight, at, size, True), _read(direction, at, size, True)
            of_weights += p * p
            of_directions += g * g
    else:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            p, g = _read(weight, at, size, False), _read(direction, at, size, False)
            of_weights += p * p
            of_directions += g * g
    tl.store(partials + program, tl.sum(of_weights, 0))
    tl.store(partials + num_programs + program, tl.sum(of_directions, 0))


@triton.jit
def _lars_step(weight, direction, velocity, at, size, momentum, decay, rate, FULL: tl.constexpr):
    p = _read(weight, at, size, FULL)
    push = rate * (_read(direction, at, size, FULL) + decay * p)
    v = momentum * _read(velocity, at, size, FULL) + push
    _write(velocity, at, v, size, FULL)
    _write(weight, at, p - v, size, FULL)


@triton.jit
def lars_step(
    addresses, settings, sizes, owners, starts, rates, num,
    momentum,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """v = momentum · v + rate · (g + decay · p), p = p - v."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start, size = tl.load(starts + program) * CHUNK, tl.load(sizes + tensor)
    weight, direction = _pointer(addresses, 0, num, tensor, ALIGNED), _pointer(addresses, 1, num, tensor, ALIGNED)
    velocity = _pointer(addresses, 2, num, tensor, ALIGNED)
    decay, rate = tl.load(settings + tensor), tl.load(rates + tensor)
    if start + CHUNK <= size:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            _lars_step(weight, direction, velocity, at, size, momentum, decay, rate, True)
    else:
        for first in range(0, CHUNK, BLOCK):
            at = start + first + tl.arange(0, BLOCK)
            _lars_step(weight, direction, velocity, at, size, momentum, decay, rate, False)
