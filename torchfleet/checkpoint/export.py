"""A table of a saved model in formats that other programs read: Parquet, or lines of `key v1 v2 ...`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.checkpoint.chain import STATISTICS, live_rows, statistics_of
from torchfleet.checkpoint.manifest import read_manifest
from torchfleet.checkpoint.part_file import Arrays
from torchfleet.errors import CheckpointError
from torchfleet.storage import Storage

FORMATS = ("parquet", "text")

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], Arrays]


def export_table(
    dirname: str,
    table: str,
    path: str,
    file_format: str = "parquet",
    with_state: bool = False,
    with_statistics: bool = False,
) -> int:
    """Write a sparse table's rows to a file, some at a time; returns how many. Keys are written as signed numbers.

    Statistics that the table keeps come in columns of their own behind the values, as they are saved: times in seconds
    since 1970, shows and clicks as of the day on which the row was last looked up. The file appears when all is in it.
    """
    if file_format not in FORMATS:
        raise CheckpointError(f"export: the format is one of {', '.join(FORMATS)}, found {file_format!r}")
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    saved = manifest.table(table)
    names = statistics_of(manifest, table) if with_statistics else ()
    width = saved.dim * (1 + saved.num_states) if with_state else saved.dim
    rows = (_some(keys, arrays, width, names) for keys, arrays in live_rows(storage, manifest, table))
    write = _write_parquet if file_format == "parquet" else _write_text
    unfinished = f"{path}.tmp"
    try:
        num = write(rows, unfinished, width, names)
        os.replace(unfinished, path)
    except OSError as error:
        raise CheckpointError(f"export to {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
    return num


def _some(keys: npt.NDArray[np.uint64], arrays: Arrays, width: int, names: tuple[str, ...]) -> Rows:
    zeros = np.zeros(len(keys), np.uint32)  # what a save from before the table kept it says of it
    kept = {name: arrays[name] if name in arrays else zeros.view(STATISTICS[name]) for name in names}
    return keys.view(np.int64), arrays["rows"][:, :width], kept


def _write_text(rows: Iterator[Rows], path: str, width: int, names: tuple[str, ...]) -> int:
    num = 0
    with open(path, "w", encoding="ascii") as file:
        for keys, values, statistics in rows:
            columns = [statistics[name].tolist() for name in names]
            for i, (key, row) in enumerate(zip(keys.tolist(), values.tolist(), strict=True)):
                # Nine digits tell every float32 from every other; times have ten, and are whole.
                numbers = [*(f"{value:.9g}" for value in row), *(_digits(column[i]) for column in columns)]
                file.write(f"{key} {' '.join(numbers)}\n")
            num += len(keys)
    return num


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _write_parquet(rows: Iterator[Rows], path: str, width: int, names: tuple[str, ...]) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise CheckpointError("Parquet needs pyarrow: pip install 'torchfleet[parquet]', or use format text") from None
    columns: list[tuple[str, Any]] = [("key", pa.int64()), ("values", pa.list_(pa.float32(), width))]
    columns += [(name, pa.from_numpy_dtype(STATISTICS[name])) for name in names]
    num = 0
    with pq.ParquetWriter(path, pa.schema(columns)) as writer:
        for keys, values, statistics in rows:
            lists = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), width)
            kept = {name: pa.array(column) for name, column in statistics.items()}
            writer.write_table(pa.table({"key": pa.array(keys), "values": lists, **kept}))
            num += len(keys)
    return num
