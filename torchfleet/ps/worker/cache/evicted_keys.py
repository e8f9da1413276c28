"""The last eviction in which a cache gave a key back to the servers, in one byte for each hash of a key.

If a table began without rows, a key that was never given back has no row on the servers: the cache sets its first
values itself, and asks no server. Two keys may share a hash. Then the cache may ask the servers for a row that they do
not have, and they create it with the same first values.
"""

from __future__ import annotations

import torch

from torchfleet.ps.gpu.integers import shift_right, signed

BYTES_PER_SLOT = 16
NEVER = 0
_FACTOR = signed(0x9E3779B97F4A7C15)


class EvictedKeys:
    """The number of the eviction, 1 to 250, in which a key was last given back."""

    NUMBERS = 250  # after which the numbers of evictions repeat

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._marks = torch.zeros(BYTES_PER_SLOT * num_slots, dtype=torch.uint8, device=device)

    @staticmethod
    def number(eviction: int) -> int:
        """The number that marks the keys of the eviction with this count."""
        return 1 + eviction % EvictedKeys.NUMBERS

    def add(self, keys: torch.Tensor, number: int) -> None:
        self._marks[self._places(keys)] = number

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The number of the last eviction of each key (uint8); NEVER for a key that was never evicted."""
        return self._marks[self._places(keys)]

    def _places(self, keys: torch.Tensor) -> torch.Tensor:
        return (shift_right(keys * _FACTOR, 32) * len(self._marks)) >> 32
