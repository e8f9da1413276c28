"""Rows between host memory and a GPU: through pinned memory, on a separate stream, concurrent with computation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchfleet.ps.worker.client.shard import Floats


def host_tensor(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Uninitialized host memory for rows on their way to `device`."""
    return torch.empty(*shape, dtype=torch.float32, pin_memory=device.type == "cuda")


def to_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the rows to the device. Computation there goes on meanwhile."""
    if device.type != "cuda":
        return rows
    stream, current = _copies(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        moved = rows.to(device, non_blocking=True)
    current.wait_stream(stream)
    moved.record_stream(current)
    return moved


def to_host(gradients: torch.Tensor) -> Floats:
    """Copy the gradients to host memory as contiguous rows. Waits for the kernels that compute them, not for later
    ones.
    """
    gradients = gradients.detach()
    if gradients.device.type != "cuda":
        found: Floats = gradients.cpu().contiguous().numpy()
        return found
    device = gradients.device
    stream, current = _copies(device), torch.cuda.current_stream(device)
    pinned = host_tensor(gradients.shape, device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        pinned.copy_(gradients, non_blocking=True)
    gradients.record_stream(stream)
    stream.synchronize()
    return np.asarray(pinned.numpy())


@functools.cache
def _copies(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
