"""One update of the rows of a table in Triton: sums of the gradients of equal slots, and the rule.

`order` are slots in ascending order, and `perm` the place of each among the gradients. A run is a range of equal slots.
A tile is TILE positions of the order, which `sum_and_update` walks through from left to right: it applies the rule to
the rows whose runs lie within the tile. Of a run that goes over an edge it leaves the part in the tile, as the left or
right part of the tile; a part that goes over both edges is a left one. `finish` adds up the parts of each such run,
beginning with the right part of the tile in which it begins, and applies the rule to its row. A run over thousands of
tiles would take it long: `fold` has added up the left parts of each group of BLOCK tiles that belong to one run.

No sum depends on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchfleet.ps.gpu import table_memory as memory
from torchfleet.ps.gpu.kernels.triton_rules import read_row, step_rates, write_row

STEP = tl.constexpr(memory.STEP)


@triton.jit
def count(counters):
    """Count an update."""
    tl.store(counters + STEP, tl.load(counters + STEP) + 1)


@triton.jit
def read_slot(order, at, mask, first, other):
    """Slots at these positions of the order, which has them from the number `first` on; `other` outside the mask."""
    return (tl.load(order + at, mask=mask, other=first + other) - first).to(tl.int32)


@triton.jit
def read_position(order, perm, grads, at, n, first, d, D: tl.constexpr):
    """(slot, whether its run ends here, gradient) at these positions of the order."""
    here = at < n
    slot = read_slot(order, at, here, first, -1)
    behind = read_slot(order, at + 1, at + 1 < n, first, -2)
    place = tl.load(perm + at, mask=here, other=0)
    mask = (here & (slot >= 0))[:, None] & (d < D)[None, :]
    grad = tl.load(grads + place[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return slot, here & (slot != behind), grad


@triton.jit
def update_tiles(
    program, words, offsets, shift, counters, rates, parts, part_slots, num_tiles, failed, s0, s1, s2, s3, decay, low,
    high, order, perm, grads, n, first, lr, settings,
    LR_IN_MEMORY: tl.constexpr, RULE: tl.constexpr, HOW: tl.constexpr, STATES: tl.constexpr, DECAY: tl.constexpr,
    BOUNDED: tl.constexpr, CHECKED: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """TILES tiles per program. `part_slots`: of the left and right part of each tile, -1: none. `rates` are for
    `finish`. `first`: the number of slot 0 in the order.
    """
    rate, factor = step_rates(counters, lr, settings, LR_IN_MEMORY, RULE)
    if program == 0:
        tl.store(rates, rate)
        tl.store(rates + 1, factor)
    tile = program.to(tl.int64) * TILES + tl.arange(0, TILES)
    begin, d = tile * TILE, tl.arange(0, PADDED)
    leftmost = read_slot(order, begin, begin < n, first, -1)
    from_left = (leftmost >= 0) & (leftmost == read_slot(order, begin - 1, (begin > 0) & (begin < n), first, -1))
    is_left = from_left  # whether the current run came over the left edge
    total = tl.zeros([TILES, PADDED], tl.float32)
    left = tl.zeros([TILES, PADDED], tl.float32)
    slot3, ends3 = leftmost, begin < 0
    # Four positions at a time, all loads first, so that they are in flight together.
    for p in range(0, TILE, 4):
        slot0, ends0, grad0 = read_position(order, perm, grads, begin + p, n, first, d, D)
        slot1, ends1, grad1 = read_position(order, perm, grads, begin + p + 1, n, first, d, D)
        slot2, ends2, grad2 = read_position(order, perm, grads, begin + p + 2, n, first, d, D)
        slot3, ends3, grad3 = read_position(order, perm, grads, begin + p + 3, n, first, d, D)
        is_left1 = is_left & (ends0 == 0)
        is_left2 = is_left1 & (ends1 == 0)
        is_left3 = is_left2 & (ends2 == 0)
        ours0 = ends0 & (is_left == 0) & (slot0 >= 0)
        ours1 = ends1 & (is_left1 == 0) & (slot1 >= 0)
        ours2 = ends2 & (is_left2 == 0) & (slot2 >= 0)
        ours3 = ends3 & (is_left3 == 0) & (slot3 >= 0)
        start0, value0, first0, second0 = read_row(
            words, offsets, shift, slot0, ours0, d, D, WIDTH, SHIFT, RULE, STATES
        )
        start1, value1, first1, second1 = read_row(
            words, offsets, shift, slot1, ours1, d, D, WIDTH, SHIFT, RULE, STATES
        )
        start2, value2, first2, second2 = read_row(
            words, offsets, shift, slot2, ours2, d, D, WIDTH, SHIFT, RULE, STATES
        )
        start3, value3, first3, second3 = read_row(
            words, offsets, shift, slot3, ours3, d, D, WIDTH, SHIFT, RULE, STATES
        )
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
        # fmt: off
        write_row(words, start0, value0, first0, second0, grad0, ours0, d, rate, factor, failed,
                  s0, s1, s2, s3, decay, low, high, D, RULE, HOW, STATES, DECAY, BOUNDED, CHECKED)
        write_row(words, start1, value1, first1, second1, grad1, ours1, d, rate, factor, failed,
                  s0, s1, s2, s3, decay, low, high, D, RULE, HOW, STATES, DECAY, BOUNDED, CHECKED)
        write_row(words, start2, value2, first2, second2, grad2, ours2, d, rate, factor, failed,
                  s0, s1, s2, s3, decay, low, high, D, RULE, HOW, STATES, DECAY, BOUNDED, CHECKED)
        write_row(words, start3, value3, first3, second3, grad3, ours3, d, rate, factor, failed,
                  s0, s1, s2, s3, decay, low, high, D, RULE, HOW, STATES, DECAY, BOUNDED, CHECKED)
        # fmt: on
    to_right = (begin + TILE < n) & (ends3 == 0) & (slot3 >= 0)
    left = tl.where(is_left[:, None], total, left)  # the run goes on over the right edge
    known = tile < num_tiles
    tl.store(part_slots + 2 * tile, tl.where(from_left, leftmost, -1), mask=known)
    tl.store(part_slots + 2 * tile + 1, tl.where(to_right & (is_left == 0), slot3, -1), mask=known)
    at = parts + (2 * tile)[:, None] * D + d[None, :]
    tl.store(at, left, mask=(known & from_left)[:, None] & (d < D)[None, :])
    tl.store(at + D, total, mask=(known & to_right & (is_left == 0))[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["n", "num_tiles"])
def sum_and_update(
    words, offsets, counters, rates, parts, part_slots, num_tiles, failed, s0, s1, s2, s3, decay, low, high,
    order, perm, grads, n, lr, settings,
    LR_IN_MEMORY: tl.constexpr, RULE: tl.constexpr, HOW: tl.constexpr, STATES: tl.constexpr, DECAY: tl.constexpr,
    BOUNDED: tl.constexpr, CHECKED: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """`update_tiles`, for all slots of one table."""
    update_tiles(tl.program_id(0), words, offsets, SHIFT, counters, rates, parts, part_slots, num_tiles, failed,
                 s0, s1, s2, s3, decay, low, high, order, perm, grads, n, 0, lr, settings,
                 LR_IN_MEMORY, RULE, HOW, STATES, DECAY, BOUNDED, CHECKED,
                 D, PADDED, WIDTH, SHIFT, TILE, TILES)  # fmt: skip


@triton.jit
def add_parts(parts, part_slots, slot, base, stride, begin, end, D: tl.constexpr, PADDED: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """(sum of the parts begin, begin + 1, ... that belong to this slot, at most BLOCK; how many). Part k is row
    base + stride * k. The parts of a run are neighbours.
    """
    at, d = begin + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    row = base + stride * at
    is_same = (tl.load(part_slots + row, mask=at < end, other=-1) == slot) & (at < end)
    inside = is_same[:, None] & (d < D)[None, :]
    total = tl.sum(tl.load(parts + row[:, None] * D + d[None, :], mask=inside, other=0.0), 0)
    return total, tl.sum(is_same.to(tl.int32), 0)


@triton.jit
def fold_tiles(group, parts, part_slots, num_tiles, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Behind the parts of tiles: the sum of the left parts of each whole group of BLOCK tiles, if they are of one run;
    its slot is -1 if they are not.
    """
    group, d = group.to(tl.int64), tl.arange(0, PADDED)
    begin, row = group * BLOCK, 2 * num_tiles.to(tl.int64) + group
    first, last = tl.load(part_slots + 2 * begin), tl.load(part_slots + 2 * (begin + BLOCK - 1))
    tl.store(part_slots + row, tl.where(first == last, first, -1))
    if (first == last) & (first >= 0):  # slots are sorted: all between are the same
        total, _ = add_parts(parts, part_slots, first, begin - begin, 2, begin, begin + BLOCK, D, PADDED, BLOCK)
        tl.store(parts + row * D + d, total, mask=d < D)


@triton.jit(do_not_specialize=["num_tiles"])
def fold(parts, part_slots, num_tiles, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """`fold_tiles`, for one table."""
    fold_tiles(tl.program_id(0), parts, part_slots, num_tiles, D, PADDED, BLOCK)


@triton.jit
def finish_run(
    tile, words, offsets, shift, rates, parts, part_slots, num_tiles, failed, s0, s1, s2, s3, decay, low, high,
    RULE: tl.constexpr, HOW: tl.constexpr, STATES: tl.constexpr, DECAY: tl.constexpr, BOUNDED: tl.constexpr,
    CHECKED: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the row of the run that begins in this tile and goes over its right edge, if there is such a run."""
    tile = tile.to(tl.int64)
    slot = tl.load(part_slots + 2 * tile + 1)
    if slot >= 0:
        d, none, num_parts = tl.arange(0, PADDED), tile - tile, num_tiles.to(tl.int64)
        begin, edge = tile + 1, (tile + BLOCK) // BLOCK * BLOCK  # of the next group
        own = tl.load(parts + (2 * tile + 1) * D + d, mask=d < D, other=0.0)
        more, num = add_parts(parts, part_slots, slot, none, 2, begin, tl.minimum(edge, num_parts), D, PADDED, BLOCK)
        total = own + more
        if begin + num == edge:
            group = edge // BLOCK
            goes_on = 1
            while goes_on > 0:
                more, num = add_parts(
                    parts, part_slots, slot, 2 * num_parts, 1, group, num_parts // BLOCK, D, PADDED, BLOCK
                )
                total += more
                group += num
                goes_on = (num == BLOCK).to(tl.int32)
            more, _ = add_parts(parts, part_slots, slot, none, 2, group * BLOCK, num_parts, D, PADDED, BLOCK)
            total += more
        rate, factor = tl.load(rates), tl.load(rates + 1)
        row, one = tl.zeros([1], tl.int32) + slot, tl.zeros([1], tl.int32) == 0
        start, value, first, second = read_row(words, offsets, shift, row, one, d, D, WIDTH, SHIFT, RULE, STATES)
        write_row(words, start, value, first, second, total[None, :], one, d, rate, factor, failed, s0, s1, s2, s3,
                  decay, low, high, D, RULE, HOW, STATES, DECAY, BOUNDED, CHECKED)  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def finish(
    words, offsets, counters, rates, parts, part_slots, num_tiles, failed, s0, s1, s2, s3, decay, low, high,
    RULE: tl.constexpr, HOW: tl.constexpr, STATES: tl.constexpr, DECAY: tl.constexpr, BOUNDED: tl.constexpr,
    CHECKED: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`finish_run`, for one table. Counts the update."""
    if tl.program_id(0) == 0:
        count(counters)
    finish_run(tl.program_id(0), words, offsets, SHIFT, rates, parts, part_slots, num_tiles, failed, s0, s1, s2, s3,
               decay, low, high, RULE, HOW, STATES, DECAY, BOUNDED, CHECKED, D, PADDED, WIDTH, SHIFT,
               BLOCK)  # fmt: skip


@triton.jit
def count_step(counters):
    """Count an update without gradients."""
    count(counters)
