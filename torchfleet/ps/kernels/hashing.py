"""The hashes of keys; integers only, so results are equal on every architecture.

`mix` is public: it decides which server owns a key, which keys are admitted with a probability, and which of equally
old rows is evicted first. `scramble` depends on a secret: it decides where a map keeps a key.
"""

from __future__ import annotations

import os

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
_LOW = np.uint64(0xFFFFFFFF)

NUM_SECRETS = 8  # 64-bit words of a map's secret: two for each round of `scramble`


@inlined
def mix(x: np.uint64) -> np.uint64:
    """The finalizer of SplitMix64: a bijection on 64 bits in which every input bit affects every output bit."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@inlined
def secret_at(state: np.ndarray, at: int) -> tuple[np.uint64, ...]:
    """The secret that a map keeps in its state from `at` on, as values that a loop holds in registers."""
    return (
        np.uint64(state[at]), np.uint64(state[at + 1]), np.uint64(state[at + 2]), np.uint64(state[at + 3]),
        np.uint64(state[at + 4]), np.uint64(state[at + 5]), np.uint64(state[at + 6]), np.uint64(state[at + 7]),
    )  # fmt: skip


@inlined
def scramble(key: np.uint64, secret: tuple[np.uint64, ...]) -> np.uint64:
    """A bijection on 64 bits that only the holder of the secret can compute or invert.

    Four rounds of a Feistel network over the halves of the key: half ^= (a * other half + b) >> 32, with a and b of the
    round. Such a round is a strongly universal function: two keys that are chosen without the secret are about as
    likely to meet in the high half as two random numbers.
    """
    high, low = key >> _S32, key & _LOW
    low ^= (secret[0] * high + secret[1]) >> _S32
    high ^= (secret[2] * low + secret[3]) >> _S32
    low ^= (secret[4] * high + secret[5]) >> _S32
    high ^= (secret[6] * low + secret[7]) >> _S32
    return (high << _S32) | low


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


def new_secret() -> npt.NDArray[np.int64]:
    """A random secret for `scramble`, in the type of a map's state."""
    return np.frombuffer(os.urandom(8 * NUM_SECRETS), np.int64)


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
