"""A hash map of words and their counts, in flat arrays that grow between two calls of the kernels."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.textfiles import Bytes, padded
from torchfleet.ps.kernels import words

_FIRST_SLOTS, _FIRST_BYTES = 1 << 16, 1 << 20


class WordMap:
    """Words are numbered in the order in which they first occur. kernels/words.py describes the arrays."""

    def __init__(self, salt: int | None = None, num_slots: int = _FIRST_SLOTS, num_bytes: int = _FIRST_BYTES) -> None:
        """`num_slots`, a power of two, and `num_bytes` are initial sizes. By default the salt is random, so that the
        author of a text cannot choose words that collide.
        """
        self.slots = np.zeros(num_slots, np.uint64)
        self.entries: npt.NDArray[np.int64] = np.empty((num_slots // 2, 3), np.int64)
        self.arena: Bytes = np.empty(num_bytes, np.uint8)
        self.state = np.zeros(words.MAP_STATE_SIZE, np.int64)
        self.state[words.SALT] = secrets.randbits(63) if salt is None else salt

    @classmethod
    def of(cls, known: Iterable[bytes]) -> WordMap:
        """The map of these words, all different. A word's number is its index."""
        made = cls()
        made.count(padded(b"\n".join(known)))
        return made

    def __len__(self) -> int:
        return int(self.state[words.NUM_WORDS])

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """A view of the counts of all words, by number."""
        return self.entries[: len(self), words.COUNT]

    def word(self, number: int) -> bytes:
        start, size, _ = self.entries[number].tolist()
        return self.arena[start : start + size].tobytes()

    def count(self, text: Bytes) -> None:
        """Count the words of a padded text."""
        at, end = 0, len(text) - len(words.PADDING)
        while at < end:
            at = int(words.count_words(text, at, end, self.slots, self.entries, self.arena, self.state))
            if at < end:
                self._grow(end - at)

    def _grow(self, num_bytes: int) -> None:
        """Double the room for words, or make room for the rest of the text's bytes and at least double the bytes."""
        if len(self) < len(self.entries):
            self.arena = _longer(self.arena, len(self.arena) + max(len(self.arena), num_bytes + 8))
            return
        self.entries = _longer(self.entries, 2 * len(self.entries))
        self.slots = np.zeros(2 * len(self.slots), np.uint64)
        words.fill_slots(self.slots, self.entries, self.arena, self.state)


def _longer(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    longer = np.empty((size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
