"""The kernels of a group of tables in Triton: one launch for all tables, by the functions that one table has.

A program finds its segment by the first programs of all segments, and the tensors of the segment's table by their
distances (group_memory.py). From there on it is a program of that table alone, so that results are equal bit for bit.
`tables`, `floats` and `ints` are the same memory, as int64, float32 and int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchfleet.ps.gpu import group_memory as group
from torchfleet.ps.gpu.kernels.triton_find import find_block
from torchfleet.ps.gpu.kernels.triton_rows import IN_MEMORY, gather_block, initialise_rows
from torchfleet.ps.gpu.kernels.triton_update import count, finish_run, fold_tiles, update_tiles

DIRECTORY, COUNTERS, ROW_KEYS = (
    tl.constexpr(group.DIRECTORY),
    tl.constexpr(group.COUNTERS),
    tl.constexpr(group.ROW_KEYS),
)
FREE, WORDS, OFFSETS = tl.constexpr(group.FREE), tl.constexpr(group.WORDS), tl.constexpr(group.OFFSETS)
RATES, NUM_POSITIONS, SECRET = tl.constexpr(group.RATES), tl.constexpr(group.NUM_POSITIONS), tl.constexpr(group.SECRET)
SIZE, STREAM, SHIFT, FIRST = (
    tl.constexpr(group.SIZE), tl.constexpr(group.STREAM), tl.constexpr(group.SHIFT), tl.constexpr(group.FIRST)
)  # fmt: skip
TABLE, COUNT, POSITION = tl.constexpr(group.TABLE), tl.constexpr(group.COUNT), tl.constexpr(group.POSITION)
PROGRAM0, PROGRAM1 = tl.constexpr(group.PROGRAM0), tl.constexpr(group.PROGRAM1)
PROGRAM2, PROGRAM3 = tl.constexpr(group.PROGRAM2), tl.constexpr(group.PROGRAM3)
PADDING, IS_PADDED, PART = tl.constexpr(group.PADDING), tl.constexpr(group.IS_PADDED), tl.constexpr(group.PART)
NUM_FIELDS, NUM_OF_SEGMENT = tl.constexpr(group.NUM_FIELDS), tl.constexpr(group.NUM_OF_SEGMENT)
LONGS, WORDS_PER_UNIT = tl.constexpr(group.UNIT // 8), tl.constexpr(group.UNIT // 4)
NEVER = tl.constexpr(1 << 62)


@triton.jit
def segment_of(segments, num_segments, tables, FIELD: tl.constexpr, SEGMENTS: tl.constexpr):
    """(the segment of this program, the program's number in it, the number of its ids, the first id's position, its
    table). FIELD: the field with the first programs of the segments. Of segments with the same first program, only the
    last has programs.
    """
    program = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, SEGMENTS)
    first = tl.load(segments + number * NUM_OF_SEGMENT + FIELD, mask=number < num_segments, other=NEVER)
    segment = segments + (tl.sum((first <= program).to(tl.int32), 0) - 1) * NUM_OF_SEGMENT
    table = tables + tl.load(segment + TABLE) * NUM_FIELDS
    return segment, program - tl.load(segment + FIELD), tl.load(segment + COUNT), tl.load(segment + POSITION), table


@triton.jit
def longs(tables, table, FIELD: tl.constexpr):
    """A tensor of int64 of this table."""
    return tables + tl.load(table + FIELD) * LONGS


@triton.jit
def words(memory, table, FIELD: tl.constexpr):
    """A tensor of 32-bit numbers of this table."""
    return memory + tl.load(table + FIELD) * WORDS_PER_UNIT


@triton.jit(do_not_specialize=["num_segments"])
def locate(
    tables, ints, segments, num_segments, keys, slots,
    INSERT: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_SIZE: tl.constexpr, SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    segment, program, n, position, table = segment_of(segments, num_segments, tables, PROGRAM0, SEGMENTS)
    find_block(
        program, longs(tables, table, DIRECTORY), longs(tables, table, COUNTERS), longs(tables, table, ROW_KEYS),
        words(ints, table, FREE), keys + position, slots + position, n, tl.load(table + NUM_POSITIONS),
        tl.load(table + SECRET), tl.load(segment + PADDING), tl.load(segment + IS_PADDED), tl.load(table + SIZE),
        INSERT, HAS_PADDING, HAS_SIZE, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_segments"])
def initialise(
    tables, floats, ints, segments, num_segments, settings, first_state,
    KIND: tl.constexpr, D: tl.constexpr, NUM_WORDS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """MOST: the most programs of a segment."""
    _, program, n, _, table = segment_of(segments, num_segments, tables, PROGRAM1, SEGMENTS)
    num_programs = tl.minimum((n + BLOCK - 1) // BLOCK, MOST)
    initialise_rows(
        program, num_programs, words(floats, table, WORDS), longs(tables, table, OFFSETS), tl.load(table + SHIFT),
        longs(tables, table, COUNTERS), longs(tables, table, ROW_KEYS), words(ints, table, FREE), settings,
        tl.load(table + STREAM), first_state, KIND, D, NUM_WORDS, PADDED, WIDTH, IN_MEMORY, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_segments"])
def gather(
    tables, floats, segments, num_segments, slots, out,
    RESOLVE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    _, program, n, position, table = segment_of(segments, num_segments, tables, PROGRAM2, SEGMENTS)
    gather_block(
        program, words(floats, table, WORDS), longs(tables, table, OFFSETS), tl.load(table + SHIFT),
        longs(tables, table, DIRECTORY), longs(tables, table, COUNTERS), slots + position, out + position * D, n,
        RESOLVE, D, PADDED, WIDTH, IN_MEMORY, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_segments"])
def number_slots(tables, segments, num_segments, slots, out, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Slots of each table as numbers among those of all tables."""
    _, program, n, position, table = segment_of(segments, num_segments, tables, PROGRAM3, SEGMENTS)
    i = program * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + position + i, mask=i < n, other=0).to(tl.int64)
    tl.store(out + position + i, (slot + tl.load(table + FIRST)).to(out.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["num_segments"])
def sum_and_update(
    tables, floats, segments, num_segments, parts, part_slots, s0, s1, s2, s3, decay, low, high,
    order, perm, grads, lr, settings,
    LR_IN_MEMORY: tl.constexpr, RULE: tl.constexpr, HOW: tl.constexpr, STATES: tl.constexpr, DECAY: tl.constexpr,
    BOUNDED: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    segment, program, n, position, table = segment_of(segments, num_segments, tables, PROGRAM0, SEGMENTS)
    part = tl.load(segment + PART)
    update_tiles(
        program, words(floats, table, WORDS), longs(tables, table, OFFSETS), tl.load(table + SHIFT),
        longs(tables, table, COUNTERS), words(floats, table, RATES), parts + part * D, part_slots + part,
        (n + TILE - 1) // TILE, part_slots, s0, s1, s2, s3, decay, low, high, order + position, perm + position, grads,
        n, tl.load(table + FIRST), lr, settings, LR_IN_MEMORY, RULE, HOW, STATES, DECAY, BOUNDED, False,
        D, PADDED, WIDTH, IN_MEMORY, TILE, TILES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_segments"])
def fold(
    tables, segments, num_segments, parts, part_slots,
    D: tl.constexpr, PADDED: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, program, n, _, _ = segment_of(segments, num_segments, tables, PROGRAM1, SEGMENTS)
    part = tl.load(segment + PART)
    fold_tiles(program, parts + part * D, part_slots + part, (n + TILE - 1) // TILE, D, PADDED, BLOCK)


@triton.jit(do_not_specialize=["num_segments"])
def finish(
    tables, floats, segments, num_segments, parts, part_slots, s0, s1, s2, s3, decay, low, high,
    RULE: tl.constexpr, HOW: tl.constexpr, STATES: tl.constexpr, DECAY: tl.constexpr, BOUNDED: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A table without gradients has one program, which counts the update."""
    segment, program, n, _, table = segment_of(segments, num_segments, tables, PROGRAM2, SEGMENTS)
    if program == 0:
        count(longs(tables, table, COUNTERS))
    num_tiles = (n + TILE - 1) // TILE
    if program < num_tiles:
        part = tl.load(segment + PART)
        finish_run(
            program, words(floats, table, WORDS), longs(tables, table, OFFSETS), tl.load(table + SHIFT),
            words(floats, table, RATES), parts + part * D, part_slots + part, num_tiles, part_slots,
            s0, s1, s2, s3, decay, low, high,
            RULE, HOW, STATES, DECAY, BOUNDED, False, D, PADDED, WIDTH, IN_MEMORY, BLOCK,
        )  # fmt: skip
