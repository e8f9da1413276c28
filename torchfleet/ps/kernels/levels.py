"""For followers of a table: which keys were noted before, and reads of a stack of maps, where the newest map that has a
key decides.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import kernel
from torchfleet.ps.kernels.key_search import find


@kernel
def read_level(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    num_alive: int,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    is_open_N: np.ndarray,
    out_NC: np.ndarray,
) -> int:
    """For every i with is_open_N[i] = 1: if the map has keys_N[i], out_NC[i] = its row, and is_open_N[i] = 0.

    Rows from `num_alive` on are of keys that were removed: these leave out_NC[i] as it is, and is_open_N[i] = 2.
    Returns how many are open.
    """
    width, num_words = np.int64(words_RW.shape[1]), np.int64(out_NC.shape[1])
    find(old, new, num_buckets, state, words_RW, keys_N, rows_N, width)
    num_open = 0
    for i in range(len(keys_N)):
        if is_open_N[i] != 1:
            continue
        if rows_N[i] < 0:
            num_open += 1
            continue
        is_open_N[i] = 2
        if rows_N[i] < num_alive:
            is_open_N[i] = 0
            copy_words(out_NC, i * num_words, words_RW, rows_N[i] * width + 2, num_words)
    return num_open


@kernel
def take_new(noted_F: np.ndarray, keys_N: np.ndarray, new_N: np.ndarray) -> int:
    """new_N = those of keys_N that noted_F does not have, which then has them; returns how many.

    noted_F has one place for each hash, 0 if empty; its length is a power of two. A key that is overwritten by another
    key of its place counts as new again. Key 0 is always new.
    """
    num, mask = 0, np.uint64(len(noted_F) - 1)
    for i in range(len(keys_N)):
        key = keys_N[i]
        at = mix(key) & mask
        if noted_F[at] != key or key == 0:
            noted_F[at] = key
            new_N[num] = key
            num += 1
    return num
