"""Hashes that decide about keys: which are admitted with a probability, and which of equally old rows goes first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.jit import kernel

_SALT = np.uint64(0x3C6EF372FE94F82B)  # a hash of its own: owners and maps must not favour the chosen
_S11 = np.uint64(11)


@kernel
def _choose(keys_N: np.ndarray, limit: np.uint64, chosen_N: np.ndarray) -> None:
    for i in range(len(keys_N)):
        chosen_N[i] = (mix(keys_N[i] ^ _SALT) >> _S11) < limit


def chosen(keys: npt.NDArray[np.uint64], probability: float) -> npt.NDArray[np.bool_]:
    """True for the share `probability` of all keys, always the same ones; a larger share contains a smaller one."""
    out = np.empty(len(keys), np.bool_)
    _choose(keys, np.uint64(int(probability * (1 << 53))), out)
    return out


@kernel
def _mix(keys_N: np.ndarray, hashes_N: np.ndarray) -> None:
    for i in range(len(keys_N)):
        hashes_N[i] = mix(keys_N[i])


def hashes(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """An order of keys that is the same on every server and has nothing to do with their numbers."""
    out = np.empty_like(keys)
    _mix(keys, out)
    return out
