"""The rules of tables in Triton: rows in a program's registers, and the formulas of plain_rules.py.

RULE names the formula. HOW is a sum of VELOCITY (momentum), NESTEROV, CENTERED (RMSprop) and POWER (FTRL with another
power than a root). STATES are the numbers of state per value. s0 to s3 are the rule's settings, by
triton_kernels.rule_arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchfleet.ps.gpu import table_memory as memory
from torchfleet.ps.gpu.kernels.triton_rows import row_start

STEP = tl.constexpr(memory.STEP)
SGD, ADAGRAD, ROWWISE, ADAM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
RMSPROP, LION, FTRL = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
VELOCITY, NESTEROV, CENTERED, POWER = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
COUPLED, DECOUPLED = tl.constexpr(1), tl.constexpr(2)  # DECAY 0: none
NEGATIVE_ZERO = tl.constexpr(-(1 << 31))  # the bits of -0.0: a velocity of a row that was never updated
MOST = tl.constexpr(2.0**100)  # as in kernels/rule_steps.py


@triton.jit
def step_rates(counters, lr, settings, LR_IN_MEMORY: tl.constexpr, RULE: tl.constexpr):
    """(step_rate, factor of the values by decoupled decay) of the next update, as plain_kernels.push. `settings`, in
    float64: ln β1, ln β2, decay of the rate, weight decay.
    """
    t = (tl.load(counters + STEP) + 1).to(tl.float64)
    rate = tl.load(lr).to(tl.float64) if LR_IN_MEMORY else 0.0 * t + lr  # lr in float64
    if RULE == ADAGRAD:
        rate = rate / (1.0 + (t - 1.0) * tl.load(settings + 2))
    factor = (1.0 - rate * tl.load(settings + 3)).to(tl.float32)
    if RULE == ADAM:
        below = 1.0 - tl.exp(t * tl.load(settings))
        rate = rate * tl.sqrt(1.0 - tl.exp(t * tl.load(settings + 1))) / below
    return rate.to(tl.float32), factor


@triton.jit
def read_row(words, offsets, shift, slot, mask, d, D: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
             RULE: tl.constexpr, STATES: tl.constexpr):  # fmt: skip
    """(start, value, first state, second state) of the rows in the mask; a state that the rule lacks is the value.
    The first state of row-wise Adagrad is the row's number, its second one the velocity.
    """
    start = row_start(offsets, shift, slot, mask, WIDTH, SHIFT)
    at = words + start[:, None] + d[None, :]
    inside = mask[:, None] & (d < D)[None, :]
    value = tl.load(at, mask=inside, other=0.0)
    first, second = value, value
    if RULE == ROWWISE:
        first = tl.load(words + start + (1 + STATES) * D, mask=mask, other=0.0)[:, None] + tl.zeros_like(value)
        if STATES > 0:
            second = tl.load(at + D, mask=inside, other=0.0)
    elif STATES > 0:
        first = tl.load(at + D, mask=inside, other=0.0)
        if STATES > 1:
            second = tl.load(at + 2 * D, mask=inside, other=0.0)
    return start, value, first, second


@triton.jit
def write_row(
    words, start, value, first, second, grad, mask, d, rate, factor, failed, s0, s1, s2, s3, decay, low, high,
    D: tl.constexpr, RULE: tl.constexpr, HOW: tl.constexpr, STATES: tl.constexpr, DECAY: tl.constexpr,
    BOUNDED: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """The rows after one gradient each, by the formulas of plain_rules.updated. CHECKED: a row whose gradient is not
    finite stays as it is, and `failed` becomes 1.
    """
    if CHECKED:
        is_finite = tl.sum(grad - grad, 1) == 0.0
        if tl.max((mask & (is_finite == 0)).to(tl.int32), 0) > 0:
            tl.store(failed, 1)
        mask = mask & is_finite
    if DECAY == COUPLED:
        grad += value * decay
    elif DECAY == DECOUPLED:
        value = value * factor
    at = words + start[:, None] + d[None, :]
    inside = mask[:, None] & (d < D)[None, :]
    if RULE == FTRL:  # a rate of 0 changes nothing
        inside = inside & (tl.zeros_like(grad) + rate != 0.0)
    value, first, second = updated(at, value, first, second, grad, inside, rate, s0, s1, s2, s3, D, RULE, HOW)
    if BOUNDED:
        value = tl.minimum(tl.maximum(value, low), high)
    tl.store(at, value, mask=inside)
    if RULE == ROWWISE:
        tl.store(words + start + (1 + STATES) * D, tl.max(first, 1), mask=mask)
        first = second
    if STATES > 0:
        tl.store(at + D, first, mask=inside)
    if STATES > 1:
        tl.store(at + 2 * D, second, mask=inside)


@triton.jit
def updated(at, value, first, second, grad, inside, rate, s0, s1, s2, s3, D: tl.constexpr, RULE: tl.constexpr,
            HOW: tl.constexpr):  # fmt: skip
    """(value, first state, second state) after one gradient."""
    if RULE == SGD:
        value, first = sgd(value, first, grad, rate, s0, s1, HOW)
    elif RULE == ADAGRAD:
        first += grad * grad
        value -= rate * (grad / (tl.sqrt(first) + s2))
    elif RULE == ROWWISE:
        first += (tl.sum(grad * grad, 1) / D)[:, None]
        if VELOCITY & HOW:
            second = s0 * second + grad / (tl.sqrt(first) + s2)
            value -= rate * second
        else:
            value -= (rate / (tl.sqrt(first) + s2)) * grad
    elif RULE == ADAM:
        first += (grad - first) * s0
        second += (grad * grad - second) * s1
        value -= rate * (first / (tl.sqrt(second) + s2))
    elif RULE == RMSPROP:
        value, first, second = rmsprop(at, value, first, second, grad, inside, rate, s0, s1, s2, s3, D, HOW)
    elif RULE == LION:
        side = s0 * first + s1 * grad
        value -= tl.where(side > 0.0, rate, tl.where(side < 0.0, -rate, 0.0))
        first = s2 * first + s3 * grad
    else:
        value, first, second = ftrl(value, first, second, grad, rate, s0, s1, s2, s3, HOW)
    return value, first, second


@triton.jit
def sgd(value, velocity, grad, rate, momentum, kept, HOW: tl.constexpr):
    """(value, velocity)."""
    step = grad
    if VELOCITY & HOW:
        is_new = velocity.to(tl.int32, bitcast=True) == NEGATIVE_ZERO
        velocity = tl.where(is_new, grad, momentum * velocity + kept * grad)
        velocity = tl.where(velocity == 0.0, 0.0, velocity)  # not -0.0
        step = grad + momentum * velocity if NESTEROV & HOW else velocity
    return value - rate * step, velocity


@triton.jit
def rmsprop(at, value, first, second, grad, inside, rate, alpha, new, eps, momentum, D: tl.constexpr,
            HOW: tl.constexpr):  # fmt: skip
    """(value, first state, second state). A third state, the velocity of a centered one, is read and written here."""
    first = alpha * first + new * (grad * grad)
    spread = first
    if CENTERED & HOW:
        second += new * (grad - second)
        spread = tl.maximum(first - second * second, 0.0)
    step = grad / (tl.sqrt(spread) + eps)
    if VELOCITY & HOW:
        if CENTERED & HOW:
            step = momentum * tl.load(at + 3 * D, mask=inside, other=0.0) + step
            tl.store(at + 3 * D, step, mask=inside)
        else:
            step = momentum * second + step
            second = step
    return value - rate * step, first, second


@triton.jit
def ftrl(value, z, n, grad, rate, l1, l2, beta, power, HOW: tl.constexpr):
    """(value, z, n), by kernels/rule_steps.ftrl_step."""
    total = tl.minimum(n + grad * grad, MOST)
    if POWER & HOW:
        before, root = raised(n, power), raised(total, power)
    else:
        before, root = tl.sqrt(n), tl.sqrt(total)
    moved = z + (grad - (root - before) * value / rate)
    moved = tl.minimum(tl.maximum(moved, -MOST), MOST)
    over = tl.abs(moved) - l1
    size = tl.minimum(over / ((beta + root) / rate + l2), MOST)
    return tl.where(over <= 0.0, 0.0, tl.where(moved > 0.0, -size, size)), moved, total


@triton.jit
def raised(x, power):
    """x ** power of numbers >= 0, with 0 ** 0 = 1."""
    found = tl.where(x > 0.0, tl.exp(power * tl.log(tl.where(x > 0.0, x, 1.0))), 0.0)
    return tl.where(power == 0.0, 1.0, found)
