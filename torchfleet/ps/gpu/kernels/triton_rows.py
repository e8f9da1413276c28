"""Rows of a table in Triton: read them, note their use, and give new ones their first values."""

from __future__ import annotations

import triton
import triton.language as tl

from torchfleet.ps.gpu import row_memory
from torchfleet.ps.gpu import table_memory as memory
from torchfleet.ps.gpu.kernels.triton_find import mix, note_ready, resolved, row_of_rank

ALIGN_WORDS = tl.constexpr(row_memory.ALIGN_WORDS)
NO_ROW = tl.constexpr(memory.NO_ROW)
TAKEN, READY, STEP = tl.constexpr(memory.TAKEN), tl.constexpr(memory.READY), tl.constexpr(memory.STEP)
NUM_FREE, LIMIT, FRESH = tl.constexpr(memory.NUM_FREE), tl.constexpr(memory.LIMIT), tl.constexpr(memory.FRESH)
IN_MEMORY, ONE_SEGMENT = tl.constexpr(-1), tl.constexpr(row_memory.ONE_SEGMENT)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
CONSTANT, UNIFORM, NORMAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # as in kernels/random.py


@triton.jit
def row_start(offsets, shift, slot, mask, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Words between the begin of the first segment and these rows. SHIFT 0: there is one segment. IN_MEMORY: `shift`
    is used instead; ONE_SEGMENT or more: there is one segment.
    """
    slot = slot.to(tl.int64)
    if SHIFT == 0:
        start = slot * WIDTH
    elif SHIFT == IN_MEMORY:
        number = slot >> shift
        is_one = tl.zeros_like(slot) + shift >= ONE_SEGMENT
        chunk = tl.load(offsets + number, mask=mask & (is_one == 0), other=0)
        start = chunk * ALIGN_WORDS + (slot - (number << shift)) * WIDTH
    else:
        chunk = tl.load(offsets + (slot >> SHIFT), mask=mask, other=0)
        start = chunk * ALIGN_WORDS + (slot & ((1 << SHIFT) - 1)) * WIDTH
    return start


@triton.jit
def gather_block(
    program, words, offsets, shift, directory, counters, slots, out, n,
    RESOLVE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = the values of row slots[i]; zeros for ABSENT, NaN for NO_ROW. RESOLVE: works as `resolve`, too."""
    i = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=-1)
    if RESOLVE:
        before = slot
        slot = resolved(directory, slot, i < n)
        tl.store(slots + i, slot, mask=(i < n) & (before != slot))
        if program == 0:
            note_ready(counters)
    start = row_start(offsets, shift, slot, slot >= 0, WIDTH, SHIFT)
    d = tl.arange(0, PADDED)
    inside = (i < n)[:, None] & (d < D)[None, :]
    value = tl.load(words + start[:, None] + d[None, :], mask=inside & (slot >= 0)[:, None], other=0.0)
    value = tl.where((slot == NO_ROW)[:, None], float("nan"), value)
    tl.store(out + i[:, None] * D + d[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def gather(
    words, offsets, directory, counters, slots, out, n,
    RESOLVE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`gather_block`, for all slots of one table."""
    gather_block(tl.program_id(0), words, offsets, SHIFT, directory, counters, slots, out, n,
                 RESOLVE, D, PADDED, WIDTH, SHIFT, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=["n", "now"])
def stamp(
    words, offsets, counters, slots, n, now,
    TICK: tl.constexpr, SEEN: tl.constexpr, BORN: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As plain_kernels.stamp. `words` are int32; a column that the table does not keep is -1."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=-1)
    found = slot >= 0
    start = row_start(offsets, SHIFT, slot, found, WIDTH, SHIFT)
    if TICK >= 0:
        tick = tl.load(counters + STEP).to(tl.int32)
        tl.store(words + start + TICK, tl.zeros([BLOCK], tl.int32) + tick, mask=found)
    if SEEN >= 0:
        seen = tl.load(words + start + SEEN, mask=found, other=0)
        tl.store(words + start + SEEN, tl.maximum(seen, now), mask=found)
    if BORN >= 0:
        born = tl.load(words + start + BORN, mask=found, other=0)
        tl.store(words + start + BORN, tl.where(born == 0, now, born), mask=found)


@triton.jit
def ratio(terms, x):
    """As kernels/random._ratio: 8 pairs of coefficients from `terms` on."""
    above = tl.zeros_like(x) + tl.load(terms + 14)
    below = tl.zeros_like(x) + tl.load(terms + 15)
    for k in tl.static_range(6, -1, -1):
        above = above * x + tl.load(terms + 2 * k)
        below = below * x + tl.load(terms + 2 * k + 1)
    return above / below


@triton.jit
def natural_log(terms, x):
    """As kernels/random._log. `terms`: ln 2, √½, then 1 / 23, 1 / 21, ..., 1."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    part = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_low = part < tl.load(terms + 1)
    part = tl.where(is_low, part * 2.0, part)
    exponent = tl.where(is_low, exponent - 1, exponent)
    s = (part - 1.0) / (part + 1.0)
    square = s * s
    total = tl.zeros_like(x)
    for k in tl.static_range(0, 12):
        total = total * square + tl.load(terms + 2 + k)
    return s * 2.0 * total + exponent.to(tl.float64) * tl.load(terms)


@triton.jit
def normal_quantile(terms, p):
    """As kernels/random.normal_quantile. `terms`: 0.425, 0.180625, 1.6, the logarithm's, then three of `ratio`."""
    q = p - 0.5
    centre = q * ratio(terms + 17, tl.load(terms + 1) - q * q)
    r = tl.sqrt(-natural_log(terms + 3, tl.where(q < 0.0, p, 1.0 - p)))
    tail = tl.where(r <= 5.0, ratio(terms + 33, r - tl.load(terms + 2)), ratio(terms + 49, r - 5.0))
    return tl.where(tl.abs(q) <= tl.load(terms), centre, tl.where(q < 0.0, -tail, tail))


@triton.jit
def initialise_rows(
    program, num_programs, words, offsets, shift, counters, row_keys, free, settings, stream, first_state,
    KIND: tl.constexpr, D: tl.constexpr, NUM_WORDS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First words of the rows that were given out since the last call, as RowLayout.first_words. The number of programs
    does not depend on the number of these rows, which only the device knows.

    `settings`, in float64: a, b (or b - a), the scale and the bound of uniform numbers, the lower end and the width of
    the range of quantiles, then the terms of `normal_quantile`.
    """
    last = tl.load(counters + NUM_FREE) + tl.load(counters + LIMIT) - tl.load(counters + FRESH)
    last = tl.minimum(tl.load(counters + TAKEN), last)
    d = tl.arange(0, PADDED)
    begin = tl.load(counters + READY) + program.to(tl.int64) * BLOCK
    while begin < last:
        rank = begin + tl.arange(0, BLOCK)
        is_new = rank < last
        row = row_of_rank(free, counters, rank, is_new)
        key = tl.load(row_keys + row, mask=is_new, other=0).to(tl.uint64, bitcast=True)
        if KIND == CONSTANT:
            value = tl.zeros([BLOCK, PADDED], tl.float64) + tl.load(settings)
        else:
            base = mix(mix(key + GOLDEN) + stream.to(tl.uint64, bitcast=True))
            bits = mix(base[:, None] + (d + 1).to(tl.uint64)[None, :] * GOLDEN) >> 11
            value = (bits.to(tl.float64) + 0.5) * tl.load(settings + 2)
            value = tl.minimum(value, tl.load(settings + 3))
            if KIND > UNIFORM:
                if KIND > NORMAL:
                    value = value * tl.load(settings + 5) + tl.load(settings + 4)
                value = normal_quantile(settings + 6, value)
            value = value * tl.load(settings + 1) + tl.load(settings)
        start = row_start(offsets, shift, row, is_new, WIDTH, SHIFT)
        tl.store(words + start[:, None] + d[None, :], value.to(tl.float32), mask=is_new[:, None] & (d < D)[None, :])
        for behind in tl.static_range(D, WIDTH, PADDED):
            other = behind + d
            inside = is_new[:, None] & (other < WIDTH)[None, :]
            rest = tl.broadcast_to(
                tl.where(other < NUM_WORDS, first_state, 0.0)[None, :], [BLOCK, PADDED]
            )  # keeps -0.0
            tl.store(words + start[:, None] + other[None, :], rest, mask=inside)
        begin += num_programs * BLOCK


@triton.jit(do_not_specialize=["stream"])
def initialise(
    words, offsets, counters, row_keys, free, settings, stream, first_state,
    KIND: tl.constexpr, D: tl.constexpr, NUM_WORDS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`initialise_rows`, for one table."""
    initialise_rows(tl.program_id(0), tl.num_programs(0), words, offsets, SHIFT, counters, row_keys, free, settings,
                    stream, first_state, KIND, D, NUM_WORDS, PADDED, WIDTH, SHIFT, BLOCK)  # fmt: skip
