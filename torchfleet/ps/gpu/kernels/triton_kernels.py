"""Launches the kernels of a table in Triton: the functions of plain_kernels.py, and the sizes of launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from torchfleet.ps.gpu.kernels import plain_kernels, triton_find, triton_rows, triton_update
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import TableMemory
from torchfleet.ps.kernels import random
from torchfleet.ps.tables.settings.rule import Rule
from torchfleet.ps.tables.settings.spec import Initializer

# Tile sizes, the fastest on an H200 (benchmarks/log.md)
FIND_BLOCK, FIND_WARPS = 64, 2
GATHER_WORDS, GATHER_WARPS = 1024, 2  # of a program
TILE = 64  # positions of the order
UPDATE_WORDS, NARROW_WORDS, WORDS_PER_WARP = 512, 1024, 128  # of a program's step; narrow: rows of up to 32 values
FINISH_WORDS, FINISH_WARPS = 4096, 4  # of parts that a program reads at once
MOST_PROGRAMS = 1024  # that give new rows their first values
MOST_WORDS = 4096  # the longest row that one program holds

KINDS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3}
RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3, "rmsprop": 4, "lion": 5, "ftrl": 6}
_VELOCITY, _NESTEROV, _CENTERED, _POWER = 1, 2, 4, 8  # as in triton_rules.py


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
        num, memory.num_positions, memory.secret, padding or 0, int(padding is not None), layout.size,
        INSERT=insert, HAS_PADDING=padding is not None, HAS_SIZE=layout.size > 0, BLOCK=FIND_BLOCK,
        num_warps=FIND_WARPS,
    )  # fmt: skip
    if insert:
        padded = triton.next_power_of_2(layout.dim)
        block = max(1, 512 // padded)
        triton_rows.initialise[(min(MOST_PROGRAMS, triton.cdiv(num, block)),)](
            memory.rows.segments[0], memory.rows.offsets, memory.counters, memory.row_keys, memory.free,
            first_settings(layout.initializer, keys.device), layout.stream, layout.first_state,
            KIND=KINDS[layout.initializer.name], D=layout.dim, NUM_WORDS=layout.num_words, PADDED=padded,
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


def push(
    memory: TableMemory,
    layout: RowLayout,
    slots: torch.Tensor,
    grads: torch.Tensor,
    lr: float | torch.Tensor,
    failed: torch.Tensor | None = None,
) -> None:
    num, rule, device = len(slots), layout.rule, slots.device
    if num:
        order, perm = torch.sort(slots, stable=True)
        num_tiles, (padded, tiles, warps, block) = triton.cdiv(num, TILE), update_sizes(layout.dim)
        num_groups = num_tiles // block
        parts = torch.empty(2 * num_tiles + num_groups, layout.dim, dtype=torch.float32, device=device)
        part_slots = torch.empty(2 * num_tiles + num_groups, dtype=torch.int32, device=device)
        how, numbers = rule_arguments(rule)
        shared = (
            memory.rows.segments[0], memory.rows.offsets, memory.counters, memory.rates, parts, part_slots, num_tiles,
            part_slots if failed is None else failed, *numbers, rule.weight_decay, rule.low, rule.high,
        )  # fmt: skip
        shape = {
            "RULE": RULES[rule.name], "HOW": how, "STATES": layout.num_states, "DECAY": decay_kind(rule),
            "BOUNDED": rule.has_bounds, "CHECKED": failed is not None, "D": layout.dim, "PADDED": padded,
            "WIDTH": layout.width, "SHIFT": _shift(memory),
        }  # fmt: skip
        triton_update.sum_and_update[(triton.cdiv(num_tiles, tiles),)](
            *shared, order, perm, grads.contiguous(), num, lr, rate_settings(rule, device), **shape,
            LR_IN_MEMORY=isinstance(lr, torch.Tensor), TILE=TILE, TILES=tiles, num_warps=warps,
        )  # fmt: skip
        if num_groups:
            triton_update.fold[(num_groups,)](
                parts, part_slots, num_tiles, D=layout.dim, PADDED=padded, BLOCK=block, num_warps=FINISH_WARPS
            )
        triton_update.finish[(num_tiles,)](*shared, **shape, BLOCK=block, num_warps=FINISH_WARPS)
    else:
        triton_update.count_step[(1,)](memory.counters, num_warps=1)


class UpdateSizes(NamedTuple):
    """The sizes of the kernels of an update."""

    padded: int  # values of a row, padded to a power of two
    tiles: int  # of a program
    warps: int  # of a program
    block: int  # parts that a program of `finish` reads at once


def update_sizes(dim: int) -> UpdateSizes:
    padded = triton.next_power_of_2(dim)
    tiles = max(1, (UPDATE_WORDS if padded > 32 else NARROW_WORDS) // padded)
    return UpdateSizes(padded, tiles, max(1, min(8, tiles * padded // WORDS_PER_WARP)), max(1, FINISH_WORDS // padded))


def decay_kind(rule: Rule) -> int:
    """DECAY of triton_rules.py."""
    return 0 if not rule.weight_decay else 2 if rule.decoupled_decay else 1


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


@functools.cache
def first_settings(first: Initializer, device: torch.device) -> torch.Tensor:
    """As triton_rows.initialise takes them. A CUDA graph holds the address: they are never dropped."""
    scale = first.b - first.a if first.name == "uniform" else first.b
    numbers = [first.a, scale, 1.1102230246251565e-16, 0.9999999999999999, random._CUT, 1.0 - 2.0 * random._CUT]
    numbers += [0.425, 0.180625, 1.6, random._LN2, 0.7071067811865476, *(1.0 / k for k in range(23, 0, -2))]
    for terms in (random._CENTRE, random._TAIL, random._FAR_TAIL):
        numbers += terms.reshape(-1).tolist()
    return torch.tensor(numbers, dtype=torch.float64, device=device)


@functools.cache
def rate_settings(rule: Rule, device: torch.device) -> torch.Tensor:
    """As triton_rules.step_rates takes them. A CUDA graph holds the address: they are never dropped."""
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in (rule.beta1, rule.beta2)]
    return torch.tensor([*logs, rule.lr_decay, rule.weight_decay], dtype=torch.float64, device=device)


@functools.cache
def rule_arguments(rule: Rule) -> tuple[int, tuple[float, float, float, float]]:
    """HOW, and s0 to s3, of triton_rules.py."""
    how = (_VELOCITY if rule.momentum else 0) + (_NESTEROV if rule.nesterov else 0)
    match rule.name:
        case "sgd":
            return how, (rule.momentum, 1.0 - rule.option("dampening"), 0.0, 0.0)
        case "adam":
            return how, (1.0 - rule.beta1, 1.0 - rule.beta2, rule.eps, 0.0)
        case "rmsprop":
            alpha, centered = rule.option("alpha"), _CENTERED if rule.option("centered") else 0
            return how + centered, (alpha, 1.0 - alpha, rule.eps, rule.momentum)
        case "lion":
            return how, (rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2)
        case "ftrl":
            power = -rule.option("lr_power")
            return 0 if power == 0.5 else _POWER, (rule.option("l1"), rule.option("l2"), rule.option("beta"), power)
        case _:
            return how, (rule.momentum, 0.0, rule.eps, 0.0)
