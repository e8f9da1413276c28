"""From raw Criteo rows to the multi-slot format. What `train.py --reader pipe` reads:

cat ctr_data/train/part-0 | python reader.py                        numbers as log(1 + x), the default of training
cat ctr_data/train/part-0 | python reader.py --no-log_scale         numbers that are scaled only
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import torchfleet as fleet

LOW = [0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
RANGE = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]
HASH_SIZE = 1_000_001


class CriteoReader(fleet.MultiSlotDataGenerator):
    """One line, one sample: 13 scaled numbers, as log(1 + x) with `log_scale`, 26 hashed categories, the label."""

    def __init__(self, log_scale: bool = True) -> None:
        super().__init__()
        self.log_scale = log_scale

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        def reader() -> Iterator[Any]:
            assert line is not None
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 40:
                raise ValueError(f"expected 40 columns, found {len(fields)}")
            numbers = [
                (int(x) - low) / span if x else 0.0 for x, low, span in zip(fields[1:14], LOW, RANGE, strict=True)
            ]
            if self.log_scale:
                numbers = [math.log1p(max(x, 0.0)) for x in numbers]
            ids = [(f"C{i}", [fleet.hash_string(x, i) % HASH_SIZE]) for i, x in enumerate(fields[14:], 1)]
            yield [("dense_input", numbers), *ids, ("label", [int(fields[0])])]

        return reader


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--log_scale", action=argparse.BooleanOptionalAction, default=True, help="numbers as log(1 + x)"
    )
    CriteoReader(parser.parse_args().log_scale).run_from_stdin()
