"""Which kernels work on a device: Triton's on a GPU, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from torchfleet.base.errors import MissingPackage
from torchfleet.ps.gpu.group_memory import GroupMemory
from torchfleet.ps.gpu.kernels import plain_groups, plain_kernels
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import TableMemory


class Kernels(Protocol):
    """The functions of plain_kernels.py, which documents them."""

    def find(
        self,
        memory: TableMemory,
        layout: RowLayout,
        keys: torch.Tensor,
        insert: bool,
        padding: int | None = ...,
        deterministic: bool = ...,
    ) -> torch.Tensor: ...

    def gather(self, memory: TableMemory, slots: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor: ...

    def find_and_gather(
        self,
        memory: TableMemory,
        layout: RowLayout,
        keys: torch.Tensor,
        insert: bool,
        dtype: torch.dtype,
        padding: int | None = ...,
        deterministic: bool = ...,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def push(
        self,
        memory: TableMemory,
        layout: RowLayout,
        slots: torch.Tensor,
        grads: torch.Tensor,
        lr: float | torch.Tensor,
        failed: torch.Tensor | None = ...,
    ) -> None: ...

    def stamp(self, memory: TableMemory, layout: RowLayout, slots: torch.Tensor, now: int) -> None: ...

    def place(self, memory: TableMemory, num_slots: int, slot_of_empty: int) -> None: ...


class GroupKernels(Protocol):
    """The functions of plain_groups.py, which documents them."""

    def find_and_gather(
        self,
        memory: GroupMemory,
        parts: Sequence[plain_groups.Part],
        keys: torch.Tensor,
        insert: bool,
        dtype: torch.dtype,
        deterministic: bool = ...,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def push(
        self,
        memory: GroupMemory,
        counts: Sequence[int],
        slots: torch.Tensor,
        grads: torch.Tensor,
        lr: float | torch.Tensor,
    ) -> None: ...


def kernels_for(device: torch.device) -> Kernels:
    """The kernels for tables on a device. Raises MissingPackage if Triton is not installed, and TableError if it does
    not work on this GPU.
    """
    if device.type == "cpu":
        return plain_kernels
    try:
        from torchfleet.ps.gpu.kernels import self_test, triton_kernels
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"tables in GPU memory need Triton, which torch's wheels for CUDA bring along ({error}): pip install triton"
        ) from None
    self_test.check_device(device)
    return triton_kernels


def group_kernels_for(kernels: Kernels) -> GroupKernels:
    """The kernels for a group of tables with these kernels."""
    if kernels is plain_kernels:
        return plain_groups
    from torchfleet.ps.gpu.kernels import triton_groups

    return triton_groups
