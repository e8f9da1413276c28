"""A table of a saved model in formats that other programs read: Parquet, or lines of `key v1 v2 ...`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.checkpoint.manifest import read_manifest
from torchfleet.checkpoint.reading import read_parts
from torchfleet.checkpoint.storage import Storage
from torchfleet.errors import CheckpointError

FORMATS = ("parquet", "text")

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


def export_table(dirname: str, table: str, path: str, file_format: str = "parquet", with_state: bool = False) -> int:
    """Write a sparse table's rows to a file, some at a time; returns how many. Keys are written as signed numbers.

    The file appears when it is complete.
    """
    if file_format not in FORMATS:
        raise CheckpointError(f"export: the format is one of {', '.join(FORMATS)}, found {file_format!r}")
    rows = _rows(dirname, table, with_state)
    write = _write_parquet if file_format == "parquet" else _write_text
    unfinished = f"{path}.tmp"
    try:
        num = write(rows, unfinished)
        os.replace(unfinished, path)
    except OSError as error:
        raise CheckpointError(f"export to {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
    return num


def _rows(dirname: str, table: str, with_state: bool) -> Iterator[Rows]:
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    saved = manifest.table(table)
    if saved.kind == "dense":
        names = ", ".join(known.name for known in manifest.tables if known.kind != "dense")
        raise CheckpointError(f"'{table}' is dense: it has no rows to export. Sparse tables: {names or 'none'}.")
    width = saved.dim * (1 + saved.num_states) if with_state else saved.dim
    for _, arrays in read_parts(storage, manifest, manifest.parts_of(table), lambda *both: both):
        yield arrays["keys"].reshape(-1).view(np.int64), arrays["rows"][:, :width]


def _write_text(rows: Iterator[Rows], path: str) -> int:
    num = 0
    with open(path, "w", encoding="ascii") as file:
        for keys, values in rows:
            for key, row in zip(keys.tolist(), values.tolist(), strict=True):
                # Nine digits tell every float32 from every other.
                file.write(f"{key} {' '.join(f'{value:.9g}' for value in row)}\n")
            num += len(keys)
    return num


def _write_parquet(rows: Iterator[Rows], path: str) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise CheckpointError("Parquet needs pyarrow: pip install 'torchfleet[parquet]', or use format text") from None
    num = 0
    writer: Any = None
    for keys, values in rows:
        width = values.shape[1]
        column = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), width)
        batch = pa.table({"key": pa.array(keys), "values": column})
        writer = writer or pq.ParquetWriter(path, batch.schema)
        writer.write_table(batch)
        num += len(keys)
    assert writer is not None  # a table has at least one part
    writer.close()
    return num
