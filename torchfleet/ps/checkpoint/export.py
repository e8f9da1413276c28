"""A table of a saved model in formats that other programs read: Parquet, safetensors, CSV, lines of `key v1 ...`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError
from torchfleet.base.extras import required
from torchfleet.base.storage import Storage, split_place
from torchfleet.ps.checkpoint.chain import live_rows, statistics_of
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.checkpoint.part_file import STATISTICS, Arrays, entries_of, header

FORMATS = ("parquet", "text", "csv", "safetensors")
_OF_ENDING = {".parquet": "parquet", ".txt": "text", ".csv": "csv", ".safetensors": "safetensors"}
_LINES = 1 << 12  # of text, written at a time
_TYPES = {"<i8": "I64", "<u4": "U32", "<f4": "F32"}  # safetensors' name of a type, by numpy's name

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], Arrays]
Read = Callable[[], Iterator[Rows]]  # reads the rows from the first on, in the same order each time


def export_table(
    dirname: str,
    table: str,
    path: str,
    file_format: str = "",
    with_state: bool = False,
    with_statistics: bool = False,
) -> int:
    """Write a sparse table's rows to a file, in chunks; returns the number of rows. Keys are written as signed numbers.
    Without `file_format` the ending of `path` says the format; a name without an ending is a Parquet file.

    `path` may be any path that fsspec opens. A folder on this machine must exist.
    The table's statistics follow the values in columns of their own, as saved: times in seconds since 1970, shows and
    clicks as of the day of the row's last lookup. The file appears when it is complete. For safetensors, which needs
    the number of rows first, the model is read twice, and all keys and statistics are in memory.
    """
    file_format = file_format or format_of(path)
    if file_format not in FORMATS:
        raise CheckpointError(f"export: the format is one of {', '.join(FORMATS)}, found {file_format!r}")
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    saved = manifest.table(table)
    names = statistics_of(manifest, table) if with_statistics else ()
    width = saved.num_words if with_state else saved.dim

    def read() -> Iterator[Rows]:
        return (_some(keys, arrays, width, names) for keys, arrays in live_rows(storage, manifest, table))

    writers = {"parquet": _write_parquet, "text": _write_text, "csv": _write_csv, "safetensors": _write_safetensors}
    write = writers[file_format]
    folder, name = split_place(path)
    target = Storage(folder)
    if target.is_local and not os.path.isdir(target.path):
        raise CheckpointError(f"export to {path}: expected a folder {target.path}, found none. Make it first.")
    try:
        with target.writing(name) as file:
            return write(read, file, width, names)
    except OSError as error:
        raise CheckpointError(f"export to {path}: {error}") from error


def format_of(path: str) -> str:
    """The format that the ending of this path says."""
    ending = os.path.splitext(split_place(path)[1])[1].lower()
    if ending and ending not in _OF_ENDING:
        raise CheckpointError(
            f"export to {path}: expected a name that ends in {', '.join(_OF_ENDING)}, found {ending}. "
            f"Say the format: --format {'|'.join(FORMATS)}"
        )
    return _OF_ENDING.get(ending, FORMATS[0])


def _some(keys: npt.NDArray[np.uint64], arrays: Arrays, width: int, names: tuple[str, ...]) -> Rows:
    zeros = np.zeros(len(keys), np.uint32)  # a save made before the table kept the statistic
    kept = {name: arrays[name] if name in arrays else zeros.view(STATISTICS[name]) for name in names}
    return keys.view(np.int64), arrays["rows"][:, :width], kept


def _write_csv(read: Read, file: Any, width: int, names: tuple[str, ...]) -> int:
    """A line of names, then the lines of text with commas between."""
    columns = ["key", *(f"value_{number}" for number in range(width)), *names]
    file.write(f"{','.join(columns)}\n".encode("ascii"))
    return _write_lines(read, file, names, ",")


def _write_text(read: Read, file: Any, width: int, names: tuple[str, ...]) -> int:
    return _write_lines(read, file, names, " ")


def _write_lines(read: Read, file: Any, names: tuple[str, ...], between: str) -> int:
    num = 0
    for keys, values, statistics in read():
        for start in range(0, len(keys), _LINES):
            some = slice(start, start + _LINES)
            columns = [statistics[name][some].tolist() for name in names]
            lines = zip(keys[some].tolist(), values[some].tolist(), *columns, strict=True)
            file.write("".join(_line(between, *line) for line in lines).encode("ascii"))
        num += len(keys)
    return num


def _line(between: str, key: int, row: list[float], *statistics: float) -> str:
    """Nine digits distinguish all float32 values; times have ten digits, and are integers."""
    numbers = [*(f"{value:.9g}" for value in row), *map(_digits, statistics)]
    return f"{between.join([str(key), *numbers])}\n"


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _write_parquet(read: Read, file: Any, width: int, names: tuple[str, ...]) -> int:
    pa, pq = (required(m, "Parquet", "parquet", ", or use --format csv") for m in ("pyarrow", "pyarrow.parquet"))
    columns: list[tuple[str, Any]] = [("key", pa.int64()), ("values", pa.list_(pa.float32(), width))]
    columns += [(name, pa.from_numpy_dtype(STATISTICS[name])) for name in names]
    num = 0
    with pq.ParquetWriter(file, pa.schema(columns)) as writer:
        for keys, values, statistics in read():
            lists = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), width)
            kept = {name: pa.array(column) for name, column in statistics.items()}
            writer.write_table(pa.table({"key": pa.array(keys), "values": lists, **kept}))
            num += len(keys)
    return num


def _write_safetensors(read: Read, file: Any, width: int, names: tuple[str, ...]) -> int:
    """Tensors `keys` (int64), one per statistic, and `values` (float32, one row per key)."""
    pieces: list[Arrays] = [{"keys": keys, **statistics} for keys, _, statistics in read()]
    types: Arrays = {"keys": np.empty(0, np.int64), **{name: np.empty(0, STATISTICS[name]) for name in names}}
    columns = {name: np.concatenate([none, *(piece[name] for piece in pieces)]) for name, none in types.items()}
    num = len(columns["keys"])
    described = [(name, _TYPES[column.dtype.str], (num,), column.nbytes) for name, column in columns.items()]
    file.write(header(entries_of([*described, ("values", "F32", (num, width), 4 * num * width)]), {"format": "pt"}))
    for column in columns.values():
        file.write(column.data)
    at = 0
    for keys, values, _ in read():
        if not np.array_equal(keys, columns["keys"][at : at + len(keys)]):
            raise CheckpointError("export: the saved model was replaced while it was read. Export again.")
        file.write(np.ascontiguousarray(values).data)
        at += len(keys)
    return num
