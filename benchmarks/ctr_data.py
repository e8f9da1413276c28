"""Criteo-like rows for benchmarks: written once to a folder, as raw rows and in the multi-slot format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from examples.ctr_dnn.prepare import generated

READER = Path(__file__).parent.parent / "examples" / "ctr_dnn" / "reader.py"


def write_raw(folder: Path, num_rows: int, num_files: int) -> list[str]:
    """Files of raw rows."""
    paths = [folder / f"raw-{i}" for i in range(num_files)]
    files = [path.open("wb") for path in paths]
    for number, line in enumerate(generated(num_rows, seed=1)):
        files[number % num_files].write(line)
    for file in files:
        file.close()
    return [str(path) for path in paths]


def write_multislot(folder: Path, raw: list[str]) -> list[str]:
    """The same rows as examples/ctr_dnn/reader.py prints them: 13 numbers, 26 ids, the label."""
    paths = [folder / f"slots-{i}" for i in range(len(raw))]
    for source, path in zip(raw, paths, strict=True):
        with open(source, "rb") as lines, path.open("wb") as out:
            subprocess.run(
                [sys.executable, str(READER), "--no-log_scale"], stdin=lines, stdout=out, check=True, timeout=600
            )
    return [str(path) for path in paths]


def write_parquet(folder: Path, raw: list[str]) -> list[str]:
    """The same rows as examples/ctr_dnn/to_parquet.py writes them: 13 numbers, 26 hashed ids, the label."""
    from examples.ctr_dnn.to_parquet import write_file

    paths = [folder / f"columns-{i}.parquet" for i in range(len(raw))]
    for source, path in zip(raw, paths, strict=True):
        write_file(source, path, log_scale=False)
    return [str(path) for path in paths]
