"""Which cached key is in which slot: sorted keys in plain torch, the same code on every device.

Keys are in two sorted arrays, a large one and a small one for new keys, so that an insertion sorts few of them.
"""

from __future__ import annotations

import torch

_LEAST_RECENT = 4096  # keys in the small array before it is merged
_RECENT_SHARE = 16  # the small array has at most 1/16 of the keys


class KeyDirectory:
    """A map from distinct 64-bit keys to slots. Searches and changes are batched."""

    def __init__(self, device: torch.device) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._keys, self._slots = nothing, nothing
        self._new_keys, self._new_slots = nothing, nothing

    def __len__(self) -> int:
        return len(self._keys) + len(self._new_keys)

    @staticmethod
    def bytes_per_key() -> int:
        """Device memory of one key, with what a merge needs beside it."""
        return 2 * 16

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Slots of keys; -1 for a key that is not here."""
        return torch.maximum(_search(self._keys, self._slots, keys), _search(self._new_keys, self._new_slots, keys))

    def insert(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Add distinct keys that are not here."""
        self._new_keys, self._new_slots = _sorted(self._new_keys, self._new_slots, keys, slots)
        if len(self._new_keys) > max(_LEAST_RECENT, len(self._keys) // _RECENT_SHARE):
            self._keys, self._slots = _sorted(self._keys, self._slots, self._new_keys, self._new_slots)
            self._new_keys, self._new_slots = self._new_keys[:0], self._new_slots[:0]

    def erase(self, is_gone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Remove the keys in slots for which the mask `is_gone`, by slot, is True. Returns (keys, slots) of these."""
        keys, slots = self.items()
        gone = is_gone[slots]
        kept = ~gone
        base = kept[: len(self._keys)]
        self._keys, self._slots = self._keys[base], self._slots[base]
        recent = kept[len(base) :]
        self._new_keys, self._new_slots = self._new_keys[recent], self._new_slots[recent]
        return keys[gone], slots[gone]

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, slots) of all, in new tensors."""
        return torch.cat([self._keys, self._new_keys]), torch.cat([self._slots, self._new_slots])


def _search(sorted_keys: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    if not len(sorted_keys):
        return torch.full_like(keys, -1)
    at = torch.searchsorted(sorted_keys, keys).clamp_(max=len(sorted_keys) - 1)
    return torch.where(sorted_keys[at] == keys, slots[at], -1)


def _sorted(
    keys: torch.Tensor, slots: torch.Tensor, more_keys: torch.Tensor, more_slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sorted arrays, or one and unsorted keys, as one sorted array."""
    joined, order = torch.sort(torch.cat([keys, more_keys]))
    return joined, torch.cat([slots, more_slots])[order]
