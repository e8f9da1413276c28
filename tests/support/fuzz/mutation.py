"""Spoils bytes: a few changes of many kinds, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUMBERS = [0, 1, 2, 7, 16, 31, 32, 64, 100, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 32767, 65535, 2**31 - 1,
            2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip
_TEXTS = [b"", b"0", b"-1", b"1e400", b"nan", b"inf", b"-0", b"9" * 40, b"\xff", b"\x00", b"\xed\xa0\x80", b"[" * 50,
          b"{" * 50, b'"', b"'", b"\\", b"\n", b"\r\n", b"\t", b",", b":", b"*", b"#", b"%s", b"../"]  # fmt: skip
_LONGEST = 1 << 14


class Mutator:
    """One for a search. `tokens` are words that the format knows."""

    def __init__(self, seed: int, tokens: Sequence[bytes]) -> None:
        self._dice = random.Random(seed)
        self._tokens = list(tokens)
        self._ways = (
            self._flip, self._put_byte, self._put_number, self._put_text, self._insert, self._remove, self._repeat,
            self._swap, self._decimal,
        )  # fmt: skip

    def spoiled(self, data: bytes, other: bytes) -> bytes:
        """`data` with one change or several; sometimes its end is that of `other`."""
        if self._dice.random() < 0.1:
            cut, joint = self._place(data), self._place(other)
            data = data[:cut] + other[joint:]
        for _ in range(1 << self._dice.randrange(4)):
            data = self._dice.choice(self._ways)(data)
        return data[:_LONGEST]

    def _word(self) -> bytes:
        is_known = self._tokens and self._dice.random() < 0.5
        return self._dice.choice(self._tokens if is_known else _TEXTS)

    def _place(self, data: bytes) -> int:
        return self._dice.randrange(len(data) + 1)

    def _stretch(self, data: bytes) -> tuple[int, int]:
        start = self._place(data)
        return start, min(len(data), start + (1 << self._dice.randrange(8)))

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        at = self._dice.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._dice.randrange(8)]) + data[at + 1 :]

    def _put_byte(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + bytes([self._dice.randrange(256)]) + data[at + 1 :]

    def _put_number(self, data: bytes) -> bytes:
        at, size = self._place(data), self._dice.choice((1, 2, 4, 8))
        number = (self._dice.choice(_NUMBERS) + self._dice.choice((-1, 0, 0, 1))) % (1 << 8 * size)
        return data[:at] + number.to_bytes(size, self._dice.choice(("little", "big"))) + data[at + size :]

    def _put_text(self, data: bytes) -> bytes:
        start, stop = self._stretch(data)
        return data[:start] + self._word() + data[stop:]

    def _insert(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + self._word() + data[at:]

    def _remove(self, data: bytes) -> bytes:
        start, stop = self._stretch(data)
        return data[:start] + data[stop:]

    def _repeat(self, data: bytes) -> bytes:
        start, stop = self._stretch(data)
        return data[:start] + data[start:stop] * self._dice.randrange(2, 9) + data[stop:]

    def _swap(self, data: bytes) -> bytes:
        (a, b), (c, d) = sorted((self._stretch(data), self._stretch(data)))
        return data if b > c else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]

    def _decimal(self, data: bytes) -> bytes:
        """A number in the text becomes another."""
        digits = [at for at, byte in enumerate(data) if 48 <= byte < 58]
        if not digits:
            return data
        start = stop = self._dice.choice(digits)
        while stop < len(data) and 48 <= data[stop] < 58:
            stop += 1
        number = self._dice.choice(_NUMBERS) * self._dice.choice((1, 1, -1))
        return data[:start] + str(number).encode() + data[stop:]
