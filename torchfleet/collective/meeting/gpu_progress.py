"""How many steps a GPU has finished, in host memory. A thread reads it without calling CUDA: the query of an event
would end the capture of a CUDA graph in the thread that trains.
"""

from __future__ import annotations

import torch

from torchfleet.base.cuda_capture import is_capturing


class GpuProgress:
    """The steps of one device. The device writes a step's number into host memory after the step's work."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._num_issued = device, 0
        self._finished = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")

    def note(self) -> None:
        """Note that a step was issued. Does nothing during the capture of a CUDA graph, whose replays do the work."""
        if is_capturing(self._device):
            return
        self._num_issued += 1
        number = torch.full((), self._num_issued, dtype=torch.int64, device=self._device)
        self._finished.copy_(number, non_blocking=True)

    @property
    def is_computing(self) -> bool:
        """Whether the device has work of a step left."""
        return int(self._finished) < self._num_issued
