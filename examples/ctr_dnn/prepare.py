"""Training and test files for CTR-DNN: from raw Criteo rows, or made up with interactions to be found.

python examples/ctr_dnn/prepare.py                                  200,000 generated rows in ./ctr_data
python examples/ctr_dnn/prepare.py --data kaggle.txt.xz             real rows: the last tenth is the test set
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchfleet.data.reading.streams import chunks, open_file

SIZES = np.geomspace(5, 50_000, 26).astype(np.int64)  # distinct values of each category
PAIRS = [(0, 4), (1, 5), (2, 6), (3, 7), (4, 8), (5, 1), (6, 2), (7, 0)]  # categories that act together
BLOCK = 20_000


def main() -> None:
    options = parse()
    lines = real(options.data) if options.data else generated(options.rows, options.seed)
    out = Path(options.out)
    num = options.rows if not options.data else sum(1 for _ in real(options.data))
    if num < 10 * options.parts:
        raise SystemExit(f"{num} rows are too few for {options.parts} training parts and as many test rows")
    written = write(lines, num, out, options.parts)
    print(f"{written['train']:,} rows in {out}/train, {written['test']:,} in {out}/test")


def write(lines: Iterable[bytes], num: int, out: Path, num_parts: int) -> dict[str, int]:
    """Write `num` lines, the last tenth of them as test rows; returns the numbers of rows."""
    cut = num * 9 // 10
    files = {"train": opened(out / "train", num_parts), "test": opened(out / "test", max(1, num_parts // 5))}
    written = {"train": 0, "test": 0}
    for number, line in enumerate(lines):
        name = "train" if number < cut else "test"
        files[name][number % len(files[name])].write(line)
        written[name] += 1
        if number % 100_000 == 99_999:
            print(f"{number + 1:,} of {num:,} rows", file=sys.stderr, flush=True)
    for file in (*files["train"], *files["test"]):
        file.close()
    return written


def parts(data: str | None, name: str) -> list[str]:
    """The files of `name`, train or test, in the folder `data`; in ctr_data if that is None, which is made with 20,000
    generated rows if it is not there. Ends the script if there are no files.
    """
    folder = Path(data or "ctr_data")
    if data is None and not folder.exists():
        made = Path(f"ctr_data.{os.getpid()}")
        write(generated(20_000, seed=0), 20_000, made, num_parts=10)
        try:
            made.rename(folder)
            print(f"no --data: 20,000 generated rows are in {folder}", flush=True)
        except OSError:  # another worker was first
            shutil.rmtree(made)
    found = sorted(str(path) for path in (folder / name).glob("part-*"))
    if not found:
        raise SystemExit(f"no part-* files in {folder}/{name}: run `python {Path(__file__).resolve()}` first")
    return found


def real(path: str) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks(open_file(path), path):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest + b"\n"


def generated(num_rows: int, seed: int) -> Iterator[bytes]:
    """Rows whose clicks depend on single values a little, and on pairs of values a lot."""
    rng = np.random.default_rng(seed)
    for start in range(0, num_rows, BLOCK):
        num = min(BLOCK, num_rows - start)
        ranks = np.stack([np.minimum(rng.zipf(1.3, num), size) - 1 for size in SIZES], axis=1)
        numbers = np.floor(np.exp(rng.normal(1.5, 1.2, (num, 13)))).astype(np.int64)
        signal = 0.3 * sum(effect(ranks[:, i], i) for i in range(26))
        signal = signal + 0.2 * (np.log1p(numbers) - 1.6) @ np.linspace(-1, 1, 13)
        for i, (a, b) in enumerate(PAIRS):
            signal = signal + 1.1 * effect(ranks[:, a] * 100_003 + ranks[:, b], 100 + i)
        clicked = rng.random(num) < 1 / (1 + np.exp(-(signal - 1.2)))
        missing = rng.random((num, 39)) < 0.05
        yield from lines_of(clicked, numbers, ranks, missing)


def lines_of(clicked: np.ndarray, numbers: np.ndarray, ranks: np.ndarray, missing: np.ndarray) -> Iterable[bytes]:
    for label, integers, values, gone in zip(
        clicked.tolist(), numbers.tolist(), ranks.tolist(), missing.tolist(), strict=True
    ):
        fields = ["" if lost else str(x) for x, lost in zip(integers, gone[:13], strict=True)]
        named = [f"{i * 0x1000193 + x & 0xFFFFFFFF:08x}" for i, x in enumerate(values)]
        fields += ["" if lost else name for name, lost in zip(named, gone[13:], strict=True)]
        yield f"{int(label)}\t{chr(9).join(fields)}\n".encode()


def effect(values: np.ndarray, salt: int) -> np.ndarray:
    """A fixed number between -1 and 1 for each value."""
    mixed = (values.astype(np.uint64) + np.uint64(salt * 7919)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    spread: np.ndarray = ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5) * 2
    return spread


def opened(folder: Path, num_parts: int) -> list[BinaryIO]:
    """New part files in place of those that were there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    return [(folder / f"part-{i}").open("wb") for i in range(num_parts)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a file of raw Criteo rows, plain or compressed")
    parser.add_argument("--rows", type=int, default=200_000, help="rows to make up when there is no --data")
    parser.add_argument("--out", default="ctr_data")
    parser.add_argument("--parts", type=int, default=10, help="training files; give at least workers × threads")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data and not Path(options.data).is_file():
        parser.error(f"no file at {options.data}; leave --data out to make rows up")
    if options.rows < 1 or options.parts < 1:
        parser.error("--rows and --parts must be at least 1")
    return options


if __name__ == "__main__":
    main()
