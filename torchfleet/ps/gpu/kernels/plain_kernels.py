"""The kernels of a table in plain torch, on any device: the reference for the kernels in Triton.

New keys get their rows in the order of the keys, so that a run can be repeated bit for bit.
"""

from __future__ import annotations

import torch

from torchfleet.ps.gpu.kernels.plain_rules import step_rate, updated
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import (
    ABSENT,
    EMPTY,
    FRESH,
    LIMIT,
    NO_ROW,
    NUM_FREE,
    OUTSIDE,
    READY,
    REFUSED,
    STEP,
    TAKEN,
    TableMemory,
    first_positions,
    stored_keys,
)


def find(
    memory: TableMemory,
    layout: RowLayout,
    keys: torch.Tensor,
    insert: bool,
    padding: int | None = None,
    deterministic: bool = True,
) -> torch.Tensor:
    """Slots (int32) of keys, which may repeat; ABSENT for a key without a row, and for `padding`. `insert`: a key
    without a row gets one with its first values; if no row is left, it counts as refused, and has the slot NO_ROW.
    """
    slots = positions(memory, keys)[1]
    is_known = torch.ones_like(keys, dtype=torch.bool) if padding is None else keys != padding
    if layout.size:
        is_outside = is_known & ((keys < 0) | (keys >= layout.size))
        memory.counters[OUTSIDE] += is_outside.sum()
        is_known &= ~is_outside
    slots[~is_known] = ABSENT
    if insert:
        missing = is_known & (slots == ABSENT)
        if bool(missing.any()):
            _insert(memory, layout, torch.unique(keys[missing]))
            found = positions(memory, keys[missing])[1]
            slots[missing] = torch.where(found == ABSENT, NO_ROW, found)
    return slots.int()


def find_and_gather(
    memory: TableMemory,
    layout: RowLayout,
    keys: torch.Tensor,
    insert: bool,
    dtype: torch.dtype,
    padding: int | None = None,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, values), as `find` and `gather`."""
    slots = find(memory, layout, keys, insert, padding)
    return slots, gather(memory, slots, layout.dim, dtype)


def positions(memory: TableMemory, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions of the entries, or of the empty entries where the search ended; slots)."""
    stored, at = stored_keys(keys), first_positions(keys, memory.secret, memory.num_positions)
    slots, todo = torch.full_like(keys, ABSENT), torch.arange(len(keys), device=keys.device)
    while len(todo):
        found = memory.directory[at[todo]]
        is_hit, is_empty = found[:, 0] == stored[todo], found[:, 0] == EMPTY
        slots[todo[is_hit]] = found[is_hit, 1]
        todo = todo[~(is_hit | is_empty)]
        at[todo] = (at[todo] + 1) % memory.num_positions
    return at, slots


def _insert(memory: TableMemory, layout: RowLayout, keys: torch.Tensor) -> None:
    """Give rows to these distinct keys, which have none."""
    slots = _take_rows(memory, keys)
    keys = keys[: len(slots)]
    _place(memory, keys, slots)
    memory.row_keys[slots] = keys
    memory.rows.write(slots, 0, layout.first_words(keys))


def place(memory: TableMemory, num_slots: int, slot_of_empty: int) -> None:
    """Write the entries of all rows below `num_slots` into an empty directory."""
    slots = torch.arange(num_slots, device=memory.row_keys.device)
    keys = memory.row_keys[:num_slots]
    is_used = (keys != EMPTY) | (slots == slot_of_empty)
    _place(memory, keys[is_used], slots[is_used])


def _place(memory: TableMemory, keys: torch.Tensor, slots: torch.Tensor) -> None:
    """Write entries for these distinct keys, which the directory does not have."""
    while len(keys):
        stored, (at, _) = stored_keys(keys), positions(memory, keys)
        memory.directory[at, 0] = stored  # of the keys that meet at an entry, one stays
        has_won = memory.directory[at, 0] == stored
        memory.directory[at[has_won], 1] = slots[has_won]
        keys, slots = keys[~has_won], slots[~has_won]


def _take_rows(memory: TableMemory, keys: torch.Tensor) -> torch.Tensor:
    """Slots for the first of these keys, as many as rows are left. Counts the other keys as refused."""
    counters = memory.counters.tolist()
    room = counters[NUM_FREE] + counters[LIMIT] - counters[FRESH] - counters[TAKEN]
    num = min(len(keys), room)
    ranks = torch.arange(counters[TAKEN], counters[TAKEN] + num, device=keys.device)
    fresh = counters[FRESH] + ranks - counters[NUM_FREE]
    old = memory.free[ranks.clamp(max=len(memory.free) - 1)].long()
    memory.counters[TAKEN] += num
    memory.counters[READY] += num
    memory.counters[REFUSED] += len(keys) - num
    return torch.where(ranks < counters[NUM_FREE], old, fresh)


def gather(memory: TableMemory, slots: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(len(slots), dim) values; zeros for ABSENT, NaN for NO_ROW."""
    out = memory.rows.read(slots.clamp(min=0), 0, dim).masked_fill_((slots < 0)[:, None], 0.0)
    return out.masked_fill_((slots == NO_ROW)[:, None], torch.nan).to(dtype)


def push(
    memory: TableMemory,
    layout: RowLayout,
    slots: torch.Tensor,
    grads: torch.Tensor,
    lr: float | torch.Tensor,
    failed: torch.Tensor | None = None,
) -> None:
    """One update by the layout's rule of every slot but ABSENT and NO_ROW, by the sum of its gradients in their order.
    `failed`, an int32: becomes 1 if a sum is not finite, and such a row stays as it is.
    """
    rule, asked, step = layout.rule, float(lr), int(memory.counters[STEP]) + 1
    memory.counters[STEP] += 1
    distinct, inverse = torch.unique(slots, return_inverse=True)
    sums = torch.zeros(len(distinct), layout.dim, dtype=torch.float32, device=slots.device)
    sums.index_add_(0, inverse, grads.float())
    is_row = distinct >= 0
    distinct, sums = distinct[is_row], sums[is_row]
    words = memory.rows.read(distinct, 0, layout.num_words)
    factor = 1.0 - rule.row_rule.rate(rule, asked, step) * rule.weight_decay
    made = updated(rule, layout.dim, words, sums, step_rate(rule, asked, step), factor)
    if failed is not None:
        is_finite = sums.isfinite().all(1, keepdim=True)
        made = torch.where(is_finite, made, words)
        failed |= (~is_finite).any().int()
    memory.rows.write(distinct, 0, made)


def stamp(memory: TableMemory, layout: RowLayout, slots: torch.Tensor, now: int) -> None:
    """Note in the statistics of these rows that they were looked up at second `now` before the next update."""
    slots = torch.unique(slots[slots >= 0])
    first, names = layout.num_words, layout.columns
    words = memory.rows.read(slots, first, first + len(names)).view(torch.int32)
    for place, name in enumerate(names):
        if name == "tick":
            words[:, place] = memory.counters[STEP].int()
        elif name == "seen":
            words[:, place] = words[:, place].clamp(min=now)
        elif name == "born":
            words[:, place] = torch.where(words[:, place] == 0, now, words[:, place])
    memory.rows.write(slots, first, words.view(torch.float32))
