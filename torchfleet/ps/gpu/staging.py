"""Pinned host memory for rows on their way to a GPU: allocated once and used in turns."""

from __future__ import annotations

from typing import Any

import torch

_TURNS = 4


class Staging:
    """Copies rows of float32 to the device on one stream. A buffer is used again when its last copy is over."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._buffers = [torch.empty(0) for _ in range(_TURNS)]
        self._copied: list[Any] = [None] * _TURNS
        self._turn = 0

    def moved(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of the rows on the device. `rows` is free when this returns; the copy is complete in the order of the
        stream.
        """
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        if len(self._buffers[turn]) < rows.numel():
            self._buffers[turn] = torch.empty(2 * rows.numel(), pin_memory=True)
        pinned = self._buffers[turn][: rows.numel()].view(rows.shape)
        pinned.copy_(rows)
        moved = pinned.to(self._device, non_blocking=True)
        self._copied[turn] = self._stream.record_event()
        return moved
