"""Script 3 of the design: Criteo rows into slots. `cat part-0 | python criteo_reader.py` shows what training reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torchfleet as fleet

LOW = [0, -3, *[0] * 11]
RANGE = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]


def scale(fields: list[str]) -> list[float]:
    return [(int(f) - low) / size if f else 0.0 for f, low, size in zip(fields, LOW, RANGE, strict=True)]


def hashed(fields: list[str]) -> list[tuple[str, list[int]]]:
    return [(f"C{i}", [fleet.hash_string(field, seed=i) % 1_000_001]) for i, field in enumerate(fields, 1)]


class CriteoReader(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        def reader() -> Iterator[Any]:
            assert line is not None
            fields = line.rstrip("\n").split("\t")
            yield [("dense_input", scale(fields[1:14])), *hashed(fields[14:]), ("label", [int(fields[0])])]

        return reader


if __name__ == "__main__":
    CriteoReader().run_from_stdin()
