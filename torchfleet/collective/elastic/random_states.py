"""The random states of a process: torch's on the CPU and on its device, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import torch


class RandomStates(msgspec.Struct):
    """Random states in types that JSON can hold."""

    torch_cpu: bytes
    torch_device: bytes  # empty: the device is the CPU
    python: tuple[int, list[int], float | None]
    numpy: tuple[list[int], int, int, float]


def random_states(device: torch.device) -> RandomStates:
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0, dtype=torch.uint8)
    return RandomStates(
        torch.get_rng_state().numpy().tobytes(),
        on_device.numpy().tobytes(),
        (version, list(numbers), gauss),
        (np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)),
    )


def set_random_states(states: RandomStates, device: torch.device) -> None:
    torch.set_rng_state(_tensor(states.torch_cpu))
    if states.torch_device:
        torch.cuda.set_rng_state(_tensor(states.torch_device), device)
    version, numbers, gauss = states.python
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = states.numpy
    numpy_state: Any = ("MT19937", np.array(keys, np.uint32), position, has_gauss, cached)
    np.random.set_state(numpy_state)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
