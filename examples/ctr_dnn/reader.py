"""From raw Criteo rows to the multi-slot format: `cat ctr_data/train/part-0 | python reader.py` shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torchfleet as fleet

LOW = [0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
RANGE = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]
HASH_SIZE = 1_000_001


class CriteoReader(fleet.MultiSlotDataGenerator):
    """One line, one sample: 13 scaled numbers, 26 hashed categories, the label."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        def reader() -> Iterator[Any]:
            assert line is not None
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 40:
                raise ValueError(f"expected 40 columns, found {len(fields)}")
            numbers = [
                (int(x) - low) / span if x else 0.0 for x, low, span in zip(fields[1:14], LOW, RANGE, strict=True)
            ]
            ids = [(f"C{i}", [fleet.hash_string(x, i) % HASH_SIZE]) for i, x in enumerate(fields[14:], 1)]
            yield [("dense_input", numbers), *ids, ("label", [int(fields[0])])]

        return reader


if __name__ == "__main__":
    CriteoReader().run_from_stdin()
