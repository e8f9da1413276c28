"""One mixing function for every hash in the package; integers only, so results are equal on every architecture.

Hashes decide which server owns a key, which keys are admitted with a probability, and which of equally old rows is
evicted first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.jit import inlined, kernel

_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)

# Owner and map position use differently salted hashes: with one hash for both, the keys of one server would fill only
# one part of its map.
_OWNER_SALT = np.uint64(0x6A09E667F3BCC909)
_CHOICE_SALT = np.uint64(0x3C6EF372FE94F82B)  # separate, so that the choice is independent of owners and map positions
_S11 = np.uint64(11)


@inlined
def mix(x: np.uint64) -> np.uint64:
    """The finalizer of SplitMix64: a bijection on 64 bits in which every input bit affects every output bit."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@inlined
def owner_hash(key: np.uint64) -> np.uint64:
    """32 bits; each server owns one contiguous range of this hash."""
    return mix(key ^ _OWNER_SALT) >> _S32


@inlined
def owner_of(key: np.uint64, num_owners: np.uint64) -> np.uint64:
    """Which of `num_owners` servers owns the key; consecutive keys are spread evenly."""
    return (owner_hash(key) * num_owners) >> _S32


@kernel
def _choose(keys_N: np.ndarray, limit: np.uint64, chosen_N: np.ndarray) -> None:
    for i in range(len(keys_N)):
        chosen_N[i] = (mix(keys_N[i] ^ _CHOICE_SALT) >> _S11) < limit


def chosen(keys: npt.NDArray[np.uint64], probability: float) -> npt.NDArray[np.bool_]:
    """True for the share `probability` of all keys, always the same ones; a larger share contains every smaller one."""
    out = np.empty(len(keys), np.bool_)
    _choose(keys, np.uint64(int(probability * (1 << 53))), out)
    return out


@kernel
def _mix(keys_N: np.ndarray, hashes_N: np.ndarray) -> None:
    for i in range(len(keys_N)):
        hashes_N[i] = mix(keys_N[i])


def hashes(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A pseudorandom order of keys that is the same on every server."""
    out = np.empty_like(keys)
    _mix(keys, out)
    return out
