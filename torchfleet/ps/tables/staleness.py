"""How old the values were that a gradient was computed from: updates between a row's pull and its push."""

from __future__ import annotations

from collections.abc import Mapping

EXACT = 16  # ages below it are counted one by one, older ones by powers of two


class Staleness:
    """A histogram of ages, in updates of the table."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def note(self, age: int) -> None:
        place = age if age < EXACT else 1 << (age.bit_length() - 1)
        self._counts[place] = self._counts.get(place, 0) + 1

    def restore(self, counts: Mapping[int, int]) -> None:
        """What `counts` gave."""
        self._counts = dict(counts)

    def counts(self) -> dict[int, int]:
        """Pushes by age; from 16 on, a key k stands for ages k to 2k - 1."""
        return dict(sorted(self._counts.items()))
