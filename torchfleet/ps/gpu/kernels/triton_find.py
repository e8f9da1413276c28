"""Finding keys in the directory of a table, and inserting them, in Triton. table_memory.py describes the memory.

A program works on BLOCK keys, one per lane. A lane that meets an empty entry takes it by a 64-bit compare-and-swap: of
the lanes with the same key exactly one wins, and the others find the entry of the winner, whose slot may not be written
yet. Such a lane returns the position of the entry (IN_FLIGHT - position), and the next kernel reads the slot there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchfleet.ps.gpu import table_memory as memory

EMPTY, REMOVED = tl.constexpr(memory.EMPTY), tl.constexpr(memory.REMOVED)
ABSENT, PENDING, IN_FLIGHT = tl.constexpr(memory.ABSENT), tl.constexpr(memory.PENDING), tl.constexpr(-3)
NO_ROW = tl.constexpr(memory.NO_ROW)
TAKEN, NUM_FREE, FRESH = tl.constexpr(memory.TAKEN), tl.constexpr(memory.NUM_FREE), tl.constexpr(memory.FRESH)
LIMIT, REFUSED, READY = tl.constexpr(memory.LIMIT), tl.constexpr(memory.REFUSED), tl.constexpr(memory.READY)
OUTSIDE, NUM_IDLE = tl.constexpr(memory.OUTSIDE), tl.constexpr(memory.NUM_IDLE)
M1, M2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(x):
    """As kernels/hashing.mix, of uint64."""
    x = (x ^ (x >> 30)) * M1
    x = (x ^ (x >> 27)) * M2
    return x ^ (x >> 31)


@triton.jit
def first_position(key, secret, num_positions):
    """As table_memory.first_positions."""
    high = mix((key ^ secret).to(tl.uint64, bitcast=True)) >> 32
    at = ((high * num_positions.to(tl.uint64)) >> 32).to(tl.int64)
    at = tl.where(key == EMPTY, num_positions.to(tl.int64), at)
    return tl.where(key == REMOVED, num_positions.to(tl.int64) + 1, at)


@triton.jit
def read_entries(directory, at, mask):
    """(keys, slots) of the entries at these positions; (0, ABSENT) where the mask is off. One load of 16 bytes each."""
    both = tl.arange(0, 2)
    pair = tl.load(directory + at[:, None] * 2 + both[None, :], mask=mask[:, None], other=0)
    return tl.split(pair)


@triton.jit
def take_entries(directory, at, stored, wanted, lane, num_positions):
    """Put keys into the entries that are `wanted` and still empty. Returns the keys that stood there before."""
    idle = num_positions.to(tl.int64) + 2 + lane % NUM_IDLE
    empty = tl.full(stored.shape, EMPTY, tl.int64)
    return tl.atomic_cas(directory + tl.where(wanted, at, idle) * 2, empty, tl.where(wanted, stored, empty))


@triton.jit
def row_of_rank(free, counters, rank, mask):
    """The slot of the rank-th row that is given out."""
    num_free = tl.load(counters + NUM_FREE)
    old = tl.load(free + rank, mask=mask & (rank < num_free), other=0).to(tl.int64)
    return tl.where(rank < num_free, old, tl.load(counters + FRESH) + rank - num_free)


@triton.jit
def find_block(
    program, directory, counters, row_keys, free, keys, slots, n, num_positions, secret, padding, is_padded, size,
    INSERT: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """slots[i] = the slot of keys[i]; ABSENT, or after an insertion NO_ROW or IN_FLIGHT - position. `program`: the
    number of this program among those of its table. `is_padded` 0: no key is padding; `size` 0: any id is allowed.
    """
    i = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    todo = i < n
    key = tl.load(keys + i, mask=todo, other=0)
    if HAS_PADDING:
        todo = todo & ((key != padding) | (tl.zeros_like(key) + is_padded == 0))
    if HAS_SIZE:
        is_outside = todo & (tl.zeros_like(key) + size > 0) & ((key < 0) | (key >= size))
        todo = todo & (is_outside == 0)
        num_outside = tl.sum(is_outside.to(tl.int32), 0)
        if num_outside > 0:
            tl.atomic_add(counters + OUTSIDE, num_outside.to(tl.int64))
    is_known = todo
    stored = tl.where(key <= REMOVED, tl.zeros_like(key), key)
    at = first_position(key, secret, num_positions)
    slot = tl.full([BLOCK], ABSENT, tl.int64)
    won = tl.zeros([BLOCK], tl.int32)
    tries = 0
    while (tl.max(todo.to(tl.int32), 0) > 0) & (tries < num_positions):
        word, held = read_entries(directory, at, todo)
        is_hit = todo & (word == stored)
        is_empty = todo & (word == EMPTY)
        slot = tl.where(is_hit, tl.where(held == PENDING, IN_FLIGHT - at, held), slot)
        is_done = is_hit | is_empty
        if INSERT:  # noqa: SIM102  (known when the kernel is compiled, the other is not)
            if tl.max(is_empty.to(tl.int32), 0) > 0:
                before = take_entries(directory, at, stored, is_empty, i, num_positions)
                has_won = is_empty & (before == EMPTY)
                is_there = has_won | (is_empty & (before == stored))
                won = tl.where(has_won, 1, won)
                slot = tl.where(is_there, IN_FLIGHT - at, slot)
                is_done = is_hit | is_there
        todo = todo & (is_done == 0)
        at = tl.where(todo, tl.where(at + 1 >= num_positions, 0, at + 1), at)
        tries += 1
    if INSERT:
        num_won = tl.sum(won, 0)
        if num_won > 0:
            has_won = won > 0
            rank = tl.atomic_add(counters + TAKEN, num_won.to(tl.int64)) + tl.cumsum(won, 0) - 1
            row = row_of_rank(free, counters, rank, has_won)
            fits = has_won & (row < tl.load(counters + LIMIT))
            tl.store(directory + at * 2 + 1, tl.where(fits, row, ABSENT), mask=has_won)
            tl.store(row_keys + row, key, mask=fits)
            slot = tl.where(has_won, tl.where(fits, row, ABSENT), slot)
        is_refused = (is_known & (slot == ABSENT)).to(tl.int32)
        slot = tl.where(is_refused > 0, NO_ROW, slot)
        if tl.max(is_refused, 0) > 0:
            tl.atomic_add(counters + REFUSED, tl.sum(is_refused, 0).to(tl.int64))
    tl.store(slots + i, slot.to(tl.int32), mask=i < n)


@triton.jit(do_not_specialize=["n", "num_positions", "secret", "padding", "is_padded", "size"])
def locate(
    directory, counters, row_keys, free, keys, slots, n, num_positions, secret, padding, is_padded, size,
    INSERT: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`find_block`, for all keys of one table."""
    find_block(tl.program_id(0), directory, counters, row_keys, free, keys, slots, n, num_positions, secret, padding,
               is_padded, size, INSERT, HAS_PADDING, HAS_SIZE, BLOCK)  # fmt: skip


@triton.jit
def resolved(directory, slot, mask):
    """The slots for what `locate` returned: slots, or positions of entries."""
    in_flight = mask & (slot <= IN_FLIGHT)
    at = tl.where(in_flight, IN_FLIGHT - slot.to(tl.int64), 0)
    found = tl.load(directory + at * 2 + 1, mask=in_flight, other=ABSENT).to(tl.int32)
    return tl.where(in_flight, tl.where(found == ABSENT, NO_ROW, found), slot)


@triton.jit
def note_ready(counters):
    """Record that all rows that were given out have their first values."""
    last = tl.load(counters + NUM_FREE) + tl.load(counters + LIMIT) - tl.load(counters + FRESH)
    tl.store(counters + READY, tl.minimum(tl.load(counters + TAKEN), last))


@triton.jit(do_not_specialize=["n"])
def resolve(directory, counters, slots, n, BLOCK: tl.constexpr):
    """Replace the positions that `locate` returned by slots, after the rows have their first values."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=0)
    tl.store(slots + i, resolved(directory, slot, i < n), mask=(i < n) & (slot <= IN_FLIGHT))
    if tl.program_id(0) == 0:
        note_ready(counters)


@triton.jit(do_not_specialize=["n", "num_positions", "secret", "slot_of_empty"])
def enter(directory, row_keys, n, num_positions, secret, slot_of_empty, BLOCK: tl.constexpr):
    """Write the entries of all rows below n into an empty directory."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(row_keys + i, mask=i < n, other=EMPTY)
    todo = (i < n) & ((key != EMPTY) | (i == slot_of_empty))
    stored = tl.where(key <= REMOVED, tl.zeros_like(key), key)
    at = first_position(key, secret, num_positions)
    while tl.max(todo.to(tl.int32), 0) > 0:
        has_won = todo & (take_entries(directory, at, stored, todo, i, num_positions) == EMPTY)
        tl.store(directory + at * 2 + 1, i, mask=has_won)
        todo = todo & (has_won == 0)
        at = tl.where(todo, tl.where(at + 1 >= num_positions, 0, at + 1), at)
