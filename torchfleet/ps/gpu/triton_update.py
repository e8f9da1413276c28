"""One update of the rows of a table in Triton: sums of the gradients of equal slots, and the rule, in one pass.

`order` are slots in ascending order, and `perm` the place of each among the gradients. A run is a range of equal slots.
A tile is TILE positions of the order, which one row of a block works through from left to right. Where a run lies
within a tile, the tile applies the rule to its row. The parts of a run that goes over the edge of a tile go to the next
level, which has two positions per tile: the part that came over the left edge, and the part that goes over the right
one. Their slots stand in ascending order again (-1: no part), so that the next level is another call of this kernel. A
tile that lies within one run writes zeros as its right part, so that the parts of a run are neighbours.

No sum depends on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchfleet.ps.gpu import table_memory as memory
from torchfleet.ps.gpu.triton_rows import row_start

STEP = tl.constexpr(memory.STEP)
SGD, ADAGRAD, ROWWISE, ADAM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NO_DECAY, COUPLED, DECOUPLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def advance(counters, lr, settings, rates, RULE: tl.constexpr):
    """As plain_kernels.advance. `settings`, in float64: ln β1, ln β2, decay of the rate, weight decay."""
    step = tl.load(counters + STEP) + 1
    tl.store(counters + STEP, step)
    t = step.to(tl.float64)
    rate = tl.load(lr)
    if RULE == ADAGRAD:
        rate = rate / (1.0 + (t - 1.0) * tl.load(settings + 2))
    tl.store(rates + 1, (1.0 - rate * tl.load(settings + 3)).to(tl.float32))
    if RULE == ADAM:
        below = 1.0 - tl.exp(t * tl.load(settings))
        rate = rate * tl.sqrt(1.0 - tl.exp(t * tl.load(settings + 1))) / below
    tl.store(rates, rate.to(tl.float32))


@triton.jit
def read_position(order, perm, grads, at, n, d, D: tl.constexpr, HAS_PERM: tl.constexpr):
    """(slot, whether its run ends here, gradient) at these positions of the order."""
    here = at < n
    slot = tl.load(order + at, mask=here, other=-1)
    behind = tl.load(order + at + 1, mask=at + 1 < n, other=-2)
    place = at
    if HAS_PERM:
        place = tl.load(perm + at, mask=here, other=0)
    mask = (here & (slot >= 0))[:, None] & (d < D)[None, :]
    grad = tl.load(grads + place[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return slot, here & (slot != behind), grad


@triton.jit
def read_row(words, offsets, slot, mask, d, D: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
             RULE: tl.constexpr):  # fmt: skip
    """(start, value, first state, second state) of the rows in the mask; a state that the rule has not is the value."""
    start = row_start(offsets, slot, mask, WIDTH, SHIFT)
    at = words + start[:, None] + d[None, :]
    inside = mask[:, None] & (d < D)[None, :]
    value = tl.load(at, mask=inside, other=0.0)
    first, second = value, value
    if RULE == ROWWISE:
        first = tl.load(words + start + D, mask=mask, other=0.0)[:, None] + tl.zeros_like(value)
    elif RULE != SGD:
        first = tl.load(at + D, mask=inside, other=0.0)
        if RULE == ADAM:
            second = tl.load(at + 2 * D, mask=inside, other=0.0)
    return start, value, first, second


@triton.jit
def write_row(
    words, start, value, first, second, grad, mask, d, rates, one_less1, one_less2, eps, decay, low, high,
    D: tl.constexpr, RULE: tl.constexpr, DECAY: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The rows after one gradient each, by the formulas of plain_rules.updated."""
    rate = tl.load(rates)
    if DECAY == COUPLED:
        grad += value * decay
    elif DECAY == DECOUPLED:
        value = value * tl.load(rates + 1)
    at = words + start[:, None] + d[None, :]
    inside = mask[:, None] & (d < D)[None, :]
    if RULE == SGD:
        value -= rate * grad
    elif RULE == ADAGRAD:
        first += grad * grad
        value -= rate * (grad / (tl.sqrt(first) + eps))
        tl.store(at + D, first, mask=inside)
    elif RULE == ROWWISE:
        first += (tl.sum(grad * grad, 1) / D)[:, None]
        value -= (rate / (tl.sqrt(first) + eps)) * grad
        tl.store(words + start + D, tl.max(first, 1), mask=mask)
    else:
        first += (grad - first) * one_less1
        second += (grad * grad - second) * one_less2
        value -= rate * (first / (tl.sqrt(second) + eps))
        tl.store(at + D, first, mask=inside)
        tl.store(at + 2 * D, second, mask=inside)
    if BOUNDED:
        value = tl.minimum(tl.maximum(value, low), high)
    tl.store(at, value, mask=inside)


@triton.jit(do_not_specialize=["n", "num_tiles"])
def sum_and_update(
    words, offsets, order, perm, grads, parts, part_slots, n, num_tiles,
    rates, one_less1, one_less2, eps, decay, low, high,
    HAS_PERM: tl.constexpr, IS_LAST: tl.constexpr, RULE: tl.constexpr, DECAY: tl.constexpr, BOUNDED: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """One level: TILES tiles per program. `parts` and `part_slots` are the input of the next one."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    begin, d = tile * TILE, tl.arange(0, PADDED)
    leftmost = tl.load(order + begin, mask=begin < n, other=-1)
    from_left = (leftmost >= 0) & (leftmost == tl.load(order + begin - 1, mask=(begin > 0) & (begin < n), other=-1))
    is_left = from_left  # whether the current run came over the left edge
    total = tl.zeros([TILES, PADDED], tl.float32)
    left = tl.zeros([TILES, PADDED], tl.float32)
    slot3 = leftmost
    ends3 = begin < 0
    # Four positions at a time, all loads first: they are under way together.
    for p in range(0, TILE, 4):
        slot0, ends0, grad0 = read_position(order, perm, grads, begin + p, n, d, D, HAS_PERM)
        slot1, ends1, grad1 = read_position(order, perm, grads, begin + p + 1, n, d, D, HAS_PERM)
        slot2, ends2, grad2 = read_position(order, perm, grads, begin + p + 2, n, d, D, HAS_PERM)
        slot3, ends3, grad3 = read_position(order, perm, grads, begin + p + 3, n, d, D, HAS_PERM)
        is_left1 = is_left & (ends0 == 0)
        is_left2 = is_left1 & (ends1 == 0)
        is_left3 = is_left2 & (ends2 == 0)
        ours0 = ends0 & (is_left == 0) & (slot0 >= 0)
        ours1 = ends1 & (is_left1 == 0) & (slot1 >= 0)
        ours2 = ends2 & (is_left2 == 0) & (slot2 >= 0)
        ours3 = ends3 & (is_left3 == 0) & (slot3 >= 0)
        start0, value0, first0, second0 = read_row(words, offsets, slot0, ours0, d, D, WIDTH, SHIFT, RULE)
        start1, value1, first1, second1 = read_row(words, offsets, slot1, ours1, d, D, WIDTH, SHIFT, RULE)
        start2, value2, first2, second2 = read_row(words, offsets, slot2, ours2, d, D, WIDTH, SHIFT, RULE)
        start3, value3, first3, second3 = read_row(words, offsets, slot3, ours3, d, D, WIDTH, SHIFT, RULE)
        grad0 += total
        grad1 += tl.where(ends0[:, None], 0.0, grad0)
        grad2 += tl.where(ends1[:, None], 0.0, grad1)
        grad3 += tl.where(ends2[:, None], 0.0, grad2)
        total = tl.where(ends3[:, None], 0.0, grad3)
        left = tl.where((is_left & ends0)[:, None], grad0, left)
        left = tl.where((is_left1 & ends1)[:, None], grad1, left)
        left = tl.where((is_left2 & ends2)[:, None], grad2, left)
        left = tl.where((is_left3 & ends3)[:, None], grad3, left)
        is_left = is_left3 & (ends3 == 0)
        write_row(words, start0, value0, first0, second0, grad0, ours0, d, rates, one_less1, one_less2, eps, decay, low,
                  high, D, RULE, DECAY, BOUNDED)  # fmt: skip
        write_row(words, start1, value1, first1, second1, grad1, ours1, d, rates, one_less1, one_less2, eps, decay, low,
                  high, D, RULE, DECAY, BOUNDED)  # fmt: skip
        write_row(words, start2, value2, first2, second2, grad2, ours2, d, rates, one_less1, one_less2, eps, decay, low,
                  high, D, RULE, DECAY, BOUNDED)  # fmt: skip
        write_row(words, start3, value3, first3, second3, grad3, ours3, d, rates, one_less1, one_less2, eps, decay, low,
                  high, D, RULE, DECAY, BOUNDED)  # fmt: skip
    if IS_LAST == 0:
        to_right = (begin + TILE < n) & (ends3 == 0) & (slot3 >= 0)
        left = tl.where(is_left[:, None], total, left)  # the run goes on over the right edge
        right = tl.where(is_left[:, None], 0.0, total)
        known = tile < num_tiles
        tl.store(part_slots + 2 * tile, tl.where(from_left, leftmost, -1), mask=known)
        tl.store(part_slots + 2 * tile + 1, tl.where(to_right, slot3, -1), mask=known)
        inside = (d < D)[None, :]
        at = parts + (2 * tile)[:, None] * D + d[None, :]
        tl.store(at, left, mask=(known & from_left)[:, None] & inside)
        tl.store(at + D, right, mask=(known & to_right)[:, None] & inside)
