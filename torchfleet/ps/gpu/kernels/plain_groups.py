"""The kernels of a group of tables in plain torch: they call the kernels of one table, for one table after the other.
They are the reference for the kernels in Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from torchfleet.ps.gpu.group_memory import GroupMemory
from torchfleet.ps.gpu.kernels import plain_kernels


class Part(NamedTuple):
    """The ids of one table in a joined call. A call has at most one part of a table."""

    table: int  # its number in the group
    num: int
    padding: int | None = None


def find_and_gather(
    memory: GroupMemory,
    parts: Sequence[Part],
    keys: torch.Tensor,
    insert: bool,
    dtype: torch.dtype,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, values) of the keys of these parts, one part after the other."""
    found = []
    for part, own in zip(parts, spans(part.num for part in parts), strict=True):
        table, layout = memory.memories[part.table], memory.layouts[part.table]
        found.append(plain_kernels.find_and_gather(table, layout, keys[own], insert, dtype, part.padding))
    return torch.cat([slots for slots, _ in found]), torch.cat([values for _, values in found])


def push(
    memory: GroupMemory,
    counts: Sequence[int],
    slots: torch.Tensor,
    grads: torch.Tensor,
    lr: float | torch.Tensor,
) -> None:
    """One update of every table, by `counts[k]` slots and gradients of table k, one table after the other."""
    for table, layout, own in zip(memory.memories, memory.layouts, spans(counts), strict=True):
        plain_kernels.push(table, layout, slots[own], grads[own], lr)


def spans(counts: Iterable[int]) -> Iterator[slice]:
    """The places of each part, one part after the other."""
    first = 0
    for num in counts:
        yield slice(first, first + num)
        first += num
