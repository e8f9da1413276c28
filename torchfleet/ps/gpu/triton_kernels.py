"""The kernels of a table in Triton, by the functions of plain_kernels.py: what to launch, with which sizes."""

from __future__ import annotations

import functools
import math

import torch
import triton

from torchfleet.ps.gpu import plain_kernels, triton_find, triton_rows, triton_update
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import TableMemory
from torchfleet.ps.kernels import random
from torchfleet.ps.tables.settings.rule import Rule

# Tile sizes, the fastest on an H200 (benchmarks/log.md)
FIND_BLOCK, FIND_WARPS = 128, 4
GATHER_WORDS, GATHER_WARPS = 2048, 4  # of a program
TILE, NEXT_TILE = 32, 16  # positions of the order, at the first level and the next ones
UPDATE_WORDS, WORDS_PER_WARP = 128, 128  # of a program's step
MOST_WORDS = 4096  # the longest row that one program holds

_KINDS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3}
_RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}


def find(
    memory: TableMemory,
    layout: RowLayout,
    keys: torch.Tensor,
    insert: bool,
    padding: int | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    if insert and deterministic:
        return plain_kernels.find(memory, layout, keys, insert, padding)
    slots = locate(memory, layout, keys, insert, padding)
    if insert and len(keys):
        grid = (triton.cdiv(len(keys), 256),)
        triton_find.resolve[grid](memory.directory, memory.counters, slots, len(keys), BLOCK=256)
    return slots


def find_and_gather(
    memory: TableMemory,
    layout: RowLayout,
    keys: torch.Tensor,
    insert: bool,
    dtype: torch.dtype,
    padding: int | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if insert and deterministic:
        return plain_kernels.find_and_gather(memory, layout, keys, insert, dtype, padding)
    slots = locate(memory, layout, keys, insert, padding)
    return slots, read_values(memory, slots, layout.dim, dtype, has_new=insert)


def locate(
    memory: TableMemory, layout: RowLayout, keys: torch.Tensor, insert: bool, padding: int | None = None
) -> torch.Tensor:
    """Slots, or positions of entries that this call inserts; their rows have first values."""
    num = len(keys)
    slots = torch.empty(num, dtype=torch.int32, device=keys.device)
    if num == 0:
        return slots
    triton_find.locate[(triton.cdiv(num, FIND_BLOCK),)](
        memory.directory, memory.counters, memory.row_keys, memory.free, keys, slots,
        num, memory.num_positions, memory.secret, padding or 0, layout.size, INSERT=insert,
        HAS_PADDING=padding is not None, HAS_SIZE=layout.size > 0, BLOCK=FIND_BLOCK, num_warps=FIND_WARPS,
    )  # fmt: skip
    if insert:
        padded = triton.next_power_of_2(layout.dim)
        block = max(1, 512 // padded)
        triton_rows.initialise[(triton.cdiv(num, block),)](
            memory.rows.segments[0], memory.rows.offsets, memory.counters, memory.row_keys, memory.free,
            _first_settings(layout, keys.device), layout.stream, layout.first_state,
            KIND=_KINDS[layout.initializer.name], D=layout.dim, NUM_WORDS=layout.num_words, PADDED=padded,
            WIDTH=layout.width, SHIFT=_shift(memory), BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return slots


def gather(memory: TableMemory, slots: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return read_values(memory, slots, dim, dtype, has_new=False)


def read_values(memory: TableMemory, slots: torch.Tensor, dim: int, dtype: torch.dtype, has_new: bool) -> torch.Tensor:
    """`gather`; `has_new`: `slots` are what `locate` returned, and become slots."""
    out = torch.empty(len(slots), dim, dtype=dtype, device=slots.device)
    if len(slots):
        padded = triton.next_power_of_2(dim)
        block = max(1, GATHER_WORDS // padded)
        triton_rows.gather[(triton.cdiv(len(slots), block),)](
            memory.rows.segments[0], memory.rows.offsets, memory.directory, memory.counters, slots, out, len(slots),
            RESOLVE=has_new, D=dim, PADDED=padded, WIDTH=memory.rows.width, SHIFT=_shift(memory), BLOCK=block,
            num_warps=GATHER_WARPS,
        )  # fmt: skip
    return out


def advance(memory: TableMemory, rule: Rule, lr: torch.Tensor, rates: torch.Tensor) -> None:
    settings = _rule_settings(rule, memory.counters.device)
    triton_update.advance[(1,)](memory.counters, lr, settings, rates, RULE=_RULES[rule.name], num_warps=1)


def push(memory: TableMemory, layout: RowLayout, slots: torch.Tensor, grads: torch.Tensor, rates: torch.Tensor) -> None:
    order, perm = torch.sort(slots, stable=True)
    grads, tile, has_perm = grads.contiguous(), TILE, True
    while len(order):
        order, grads, is_last = _level(memory, layout, order, perm, grads, rates, tile, has_perm)
        if is_last:
            break
        tile, has_perm = NEXT_TILE, False


def _level(
    memory: TableMemory,
    layout: RowLayout,
    order: torch.Tensor,
    perm: torch.Tensor,
    grads: torch.Tensor,
    rates: torch.Tensor,
    tile: int,
    has_perm: bool,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """One launch of sum_and_update: (slots of the next level, its gradients, whether there is none)."""
    num, rule = len(order), layout.rule
    num_tiles = triton.cdiv(num, tile)
    padded = triton.next_power_of_2(layout.dim)
    tiles = max(1, UPDATE_WORDS // padded)
    parts = torch.empty(2 * num_tiles, layout.dim, dtype=torch.float32, device=order.device)
    part_slots = torch.empty(2 * num_tiles, dtype=torch.int32, device=order.device)
    decay = 0 if not rule.weight_decay else 2 if rule.decoupled_decay else 1
    triton_update.sum_and_update[(triton.cdiv(num_tiles, tiles),)](
        memory.rows.segments[0], memory.rows.offsets, order, perm, grads, parts, part_slots, num, num_tiles,
        rates, 1.0 - rule.beta1, 1.0 - rule.beta2, rule.eps, rule.weight_decay, rule.low, rule.high,
        HAS_PERM=has_perm, IS_LAST=num_tiles == 1, RULE=_RULES[rule.name], DECAY=decay, BOUNDED=rule.has_bounds,
        D=layout.dim, PADDED=padded, WIDTH=layout.width, SHIFT=_shift(memory), TILE=tile, TILES=tiles,
        num_warps=max(1, min(8, tiles * padded // WORDS_PER_WARP)),
    )  # fmt: skip
    return part_slots, parts, num_tiles == 1


def stamp(memory: TableMemory, layout: RowLayout, slots: torch.Tensor, now: int) -> None:
    if len(slots):
        places = {name: place for place, name in enumerate(layout.columns, layout.num_words)}
        triton_rows.stamp[(triton.cdiv(len(slots), 256),)](
            memory.rows.segments[0].view(torch.int32), memory.rows.offsets, memory.counters, slots, len(slots), now,
            TICK=places.get("tick", -1), SEEN=places.get("seen", -1), BORN=places.get("born", -1),
            WIDTH=layout.width, SHIFT=_shift(memory), BLOCK=256,
        )  # fmt: skip


def place(memory: TableMemory, num_slots: int, slot_of_empty: int) -> None:
    if num_slots:
        triton_find.enter[(triton.cdiv(num_slots, 256),)](
            memory.directory, memory.row_keys, num_slots, memory.num_positions, memory.secret, slot_of_empty, BLOCK=256
        )


def _shift(memory: TableMemory) -> int:
    """As triton_rows.row_start takes it."""
    return memory.rows.shift if len(memory.rows.segments) > 1 else 0


@functools.lru_cache(maxsize=256)
def _first_settings(layout: RowLayout, device: torch.device) -> torch.Tensor:
    """As triton_rows.initialise takes them."""
    first = layout.initializer
    scale = first.b - first.a if first.name == "uniform" else first.b
    numbers = [first.a, scale, 1.1102230246251565e-16, 0.9999999999999999, random._CUT, 1.0 - 2.0 * random._CUT]
    numbers += [0.425, 0.180625, 1.6, random._LN2, 0.7071067811865476, *(1.0 / k for k in range(23, 0, -2))]
    for terms in (random._CENTRE, random._TAIL, random._FAR_TAIL):
        numbers += terms.reshape(-1).tolist()
    return torch.tensor(numbers, dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=256)
def _rule_settings(rule: Rule, device: torch.device) -> torch.Tensor:
    """As triton_update.advance takes them."""
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in (rule.beta1, rule.beta2)]
    return torch.tensor([*logs, rule.lr_decay, rule.weight_decay], dtype=torch.float64, device=device)
