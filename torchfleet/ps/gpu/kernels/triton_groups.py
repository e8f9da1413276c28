"""Launches the kernels of a group of tables in Triton: the functions of plain_groups.py, and the sizes of launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from torchfleet.ps.gpu.group_memory import GroupMemory
from torchfleet.ps.gpu.kernels import plain_groups, triton_group
from torchfleet.ps.gpu.kernels import triton_kernels as single
from torchfleet.ps.gpu.kernels.plain_groups import Part

_NUMBER_BLOCK = 256
_MOST_NUMBER = 1 << 31  # of a slot among those of all tables: above, an update sorts 64-bit numbers


def find_and_gather(
    memory: GroupMemory,
    parts: Sequence[Part],
    keys: torch.Tensor,
    insert: bool,
    dtype: torch.dtype,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if insert and deterministic:
        return plain_groups.find_and_gather(memory, parts, keys, insert, dtype)
    layout = memory.layout
    slots = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    out = torch.empty(len(keys), layout.dim, dtype=dtype, device=keys.device)
    if not len(keys):
        return slots, out
    padded = triton.next_power_of_2(layout.dim)
    new_block, gather_block = max(1, 512 // padded), max(1, single.GATHER_WORDS // padded)
    rows, grids = [], [0, 0, 0]
    position = 0
    for part in parts:
        rows.append((part.table, part.num, position, *grids, 0, part.padding or 0, int(part.padding is not None), 0))
        grids[0] += triton.cdiv(part.num, single.FIND_BLOCK)
        grids[1] += min(single.MOST_PROGRAMS, triton.cdiv(part.num, new_block))
        grids[2] += triton.cdiv(part.num, gather_block)
        position += part.num
    tables, floats, ints = _views(memory)
    segments = memory.segments(rows)
    width = {"SEGMENTS": _padded(len(rows))}
    triton_group.locate[(grids[0],)](
        tables, ints, segments, len(rows), keys, slots, INSERT=insert,
        HAS_PADDING=any(part.padding is not None for part in parts),
        HAS_SIZE=any(memory.layouts[part.table].size for part in parts),
        BLOCK=single.FIND_BLOCK, num_warps=single.FIND_WARPS, **width,
    )  # fmt: skip
    shape = {"D": layout.dim, "PADDED": padded, "WIDTH": layout.width, **width}
    if insert:
        triton_group.initialise[(grids[1],)](
            tables, floats, ints, segments, len(rows), single.first_settings(layout.initializer, keys.device),
            layout.first_state, KIND=single.KINDS[layout.initializer.name], NUM_WORDS=layout.num_words,
            MOST=single.MOST_PROGRAMS, BLOCK=new_block, num_warps=4, enable_fp_fusion=False, **shape,
        )  # fmt: skip
    triton_group.gather[(grids[2],)](
        tables, floats, segments, len(rows), slots, out, RESOLVE=insert, BLOCK=gather_block,
        num_warps=single.GATHER_WARPS, **shape,
    )  # fmt: skip
    return slots, out


def push(
    memory: GroupMemory,
    counts: Sequence[int],
    slots: torch.Tensor,
    grads: torch.Tensor,
    lr: float | torch.Tensor,
) -> None:
    layout, rule, device = memory.layout, memory.layout.rule, slots.device
    sizes = single.update_sizes(layout.dim)
    rows, grids, num_parts = _update_segments(counts, sizes)
    tables, floats, _ = _views(memory)
    segments, width = memory.segments(rows), {"SEGMENTS": _padded(len(rows))}
    parts = torch.empty(num_parts, layout.dim, dtype=torch.float32, device=device)
    part_slots = torch.empty(num_parts, dtype=torch.int32, device=device)
    how, numbers = single.rule_arguments(rule)
    shared = tables, floats, segments, len(rows), parts, part_slots, *numbers, rule.weight_decay, rule.low, rule.high
    shape = {
        "RULE": single.RULES[rule.name], "HOW": how, "STATES": layout.num_states, "DECAY": single.decay_kind(rule),
        "BOUNDED": rule.has_bounds, "D": layout.dim, "PADDED": sizes.padded, "WIDTH": layout.width,
        "TILE": single.TILE, **width,
    }  # fmt: skip
    if grids[0]:
        order, perm = torch.sort(_numbered(memory, segments, len(rows), slots, grids[3]), stable=True)
        triton_group.sum_and_update[(grids[0],)](
            *shared, order, perm, grads.contiguous(), lr, single.rate_settings(rule, device),
            LR_IN_MEMORY=isinstance(lr, torch.Tensor), TILES=sizes.tiles, num_warps=sizes.warps, **shape,
        )  # fmt: skip
    if grids[1]:
        triton_group.fold[(grids[1],)](
            tables, segments, len(rows), parts, part_slots, D=layout.dim, PADDED=sizes.padded, TILE=single.TILE,
            BLOCK=sizes.block, num_warps=single.FINISH_WARPS, **width,
        )  # fmt: skip
    triton_group.finish[(grids[2],)](*shared, **shape, BLOCK=sizes.block, num_warps=single.FINISH_WARPS)


def _update_segments(counts: Sequence[int], sizes: single.UpdateSizes) -> tuple[list[tuple[int, ...]], list[int], int]:
    """(segments, programs of the four kernels, rows of parts). Tiles and their groups begin anew in every table, as if
    it were alone.
    """
    rows, grids, position, part = [], [0, 0, 0, 0], 0, 0
    for table, num in enumerate(counts):
        rows.append((table, num, position, *grids, part, 0, 0))
        num_tiles = triton.cdiv(num, single.TILE)
        num_groups = num_tiles // sizes.block
        grids[0] += triton.cdiv(num_tiles, sizes.tiles)
        grids[1] += num_groups
        grids[2] += max(1, num_tiles)
        grids[3] += triton.cdiv(num, _NUMBER_BLOCK)
        position += num
        part += 2 * num_tiles + num_groups
    return rows, grids, max(1, part)


def _numbered(
    memory: GroupMemory, segments: torch.Tensor, num_segments: int, slots: torch.Tensor, grid: int
) -> torch.Tensor:
    """Slots as numbers among those of all tables, so that one sort brings them into the order of each table."""
    dtype = torch.int32 if memory.num_slots < _MOST_NUMBER else torch.int64
    out = torch.empty(len(slots), dtype=dtype, device=slots.device)
    triton_group.number_slots[(grid,)](
        memory.numbers, segments, num_segments, slots, out, SEGMENTS=_padded(num_segments), BLOCK=_NUMBER_BLOCK
    )
    return out


def _views(memory: GroupMemory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`memory.numbers`, which distances are counted from, as int64, float32 and int32."""
    return memory.numbers, memory.numbers.view(torch.float32), memory.numbers.view(torch.int32)


def _padded(num_segments: int) -> int:
    """The number of segments, rounded up to one of few values: the kernels are compiled for each value."""
    return max(32, int(triton.next_power_of_2(num_segments)))
