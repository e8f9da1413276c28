"""Copies of tensors in host memory, which are not affected by further training.

On a GPU, a separate stream copies into pinned memory, and the host waits once. The memory is reused for the next
snapshot: pinning it takes longer than filling it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torchfleet.base.errors import CheckpointError

_ALIGNED = 64  # bytes: the alignment of every dtype
AnyKey = TypeVar("AnyKey")


def _host_memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class Snapshots:
    """Takes one snapshot at a time: the next one overwrites it."""

    def __init__(self, memory: Callable[[int], torch.Tensor] = _host_memory) -> None:
        """`memory` returns host memory of the given number of bytes."""
        self._make, self._memory = memory, torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[Any, Any] | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, tensors: Mapping[AnyKey, torch.Tensor]) -> dict[AnyKey, torch.Tensor]:
        """Copy the tensors to host memory, by the same keys, with their values at this point of the current stream."""
        sources = [tensor.detach() for tensor in tensors.values()]
        copies = self._places(sources)
        on_gpu = [pair for pair in zip(copies, sources, strict=True) if pair[1].is_cuda]
        for copy, source in zip(copies, sources, strict=True):
            if not source.is_cuda:
                copy.copy_(source)
        if on_gpu:
            self._copy_from_gpu(on_gpu)
        return dict(zip(tensors, copies, strict=True))

    def _places(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, total = [], 0
        for source in sources:
            starts.append(total)
            total += -(-source.nbytes // _ALIGNED) * _ALIGNED
        from_gpu = any(source.is_cuda for source in sources)
        if total > len(self._memory) or (from_gpu and self._unpin is None):
            self._grow(total, from_gpu)
        return [
            self._memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
            for start, source in zip(starts, sources, strict=True)
        ]

    def _grow(self, num_bytes: int, pinned: bool) -> None:
        if self._unpin is not None:
            self._unpin()
        self._memory, self._unpin = self._make(num_bytes), None
        if pinned:  # not by torch's allocator, which rounds up to a power of 2
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(runtime.cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))
            if status:
                raise CheckpointError(
                    f"{num_bytes:,} bytes of host memory cannot be pinned (CUDA error {status}): a save or copy beside "
                    "training needs as much as this rank writes. Leave asynchronous=True or copy_steps out, or allow "
                    "more memory."
                )
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, self._memory.data_ptr())

    def _copy_from_gpu(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, source in pairs:
                copy.copy_(source, non_blocking=True)
        self._stream.synchronize()
