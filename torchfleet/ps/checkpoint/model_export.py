"""Export of a whole saved model: a folder of plain files, for programs without torchfleet."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError
from torchfleet.base.saved_extra import script_extra
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.byte_words import to_bytes
from torchfleet.ps.checkpoint.export import FORMATS, export_table
from torchfleet.ps.checkpoint.manifest import Manifest, Parameter, Table, read_manifest
from torchfleet.ps.checkpoint.part_file import ITEM_BYTES, entries_of, header
from torchfleet.ps.checkpoint.part_reader import read_dense
from torchfleet.ps.checkpoint.part_writer import write_file

DESCRIPTION, PARAMETERS = "model.json", "parameters.safetensors"
_ENDINGS = {"parquet": "parquet", "text": "txt", "csv": "csv", "safetensors": "rows.safetensors"}
# safetensors' name of a type, by torch's name.
_TYPES = {
    **{"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}


def export_model(
    dirname: str,
    out: str,
    file_format: str = FORMATS[0],
    with_state: bool = False,
    with_statistics: bool = False,
    show: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write a whole model into the folder `out`, which must be new or empty; returns the contents of `model.json`.

    parameters.safetensors has dense parameters and buffers by name and in their own types; every sparse table has a
    file, as `export_table` writes it; model.json, which is written last, lists the files. `out` may be any path that
    fsspec opens. `show` is called with each file's name before it is written.
    """
    storage, target = Storage(dirname), Storage(out)
    manifest = read_manifest(storage)
    _prepare(target)
    tables = []
    for table in manifest.tables:
        if not table.is_dense:
            name = f"{quote(table.name, safe='')}.{_ENDINGS[file_format]}"
            show(name)
            num = export_table(dirname, table.name, target.place(name), file_format, with_state, with_statistics)
            tables.append(_described(table, name, num))
    show(PARAMETERS)
    parameters = _write_parameters(storage, manifest, target)
    description = {"format": "torchfleet export", "version": 1, "save": manifest.save, "tables": tables}
    description |= {"parameters": parameters, "extra": script_extra(manifest.extra)}
    write_file(target, DESCRIPTION, [msgspec.json.format(msgspec.json.encode(description), indent=2)])
    return description


def _prepare(target: Storage) -> None:
    if target.is_local:
        try:
            os.makedirs(target.path, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"export to {target.path}: {error}") from error
    found = next(iter([*target.files(), *target.folders()]), None)
    if found is not None:
        raise CheckpointError(
            f"export to {target.path}: expected a new or an empty folder, found '{found}' in it. Give another one."
        )


def _described(table: Table, file: str, num_rows: int) -> dict[str, Any]:
    """A table's entry in model.json. If the table has a declared size, an id without a row has its initial value, which
    follows from seed and name.
    """
    size = {"num_embeddings": table.size} if table.size else {}
    return {"name": table.name, "file": file, "dim": table.dim, "rows": num_rows, **size}


def _write_parameters(storage: Storage, manifest: Manifest, target: Storage) -> list[str]:
    """Write the tensors; returns their names. Holds the values of all dense tables in memory."""
    described, blocks = [], []
    for table in manifest.tables:
        # a copy, so that the state of optimizers is released at once
        values = read_dense(storage, manifest, table)[0].copy() if table.is_dense else np.empty(0, np.float32)
        for parameter in table.parameters:
            data = _bytes(parameter, values[parameter.start : parameter.start + parameter.size])
            described.append((parameter.name, _type(parameter), parameter.shape, len(data)))
            blocks.append(data.data)
    write_file(target, PARAMETERS, [header(entries_of(described), {"format": "pt"}), *blocks])
    return [name for name, *_ in described]


def _bytes(parameter: Parameter, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    if parameter.dtype == "float32":
        return np.ascontiguousarray(values).view(np.uint8)
    num = int(np.prod(parameter.shape, dtype=np.int64))
    return to_bytes(values, num * ITEM_BYTES[_type(parameter)], parameter.name)


def _type(parameter: Parameter) -> str:
    if parameter.dtype not in _TYPES:
        raise CheckpointError(
            f"export: '{parameter.name}' is {parameter.dtype}, for which safetensors files have no name; they have "
            f"{', '.join(_TYPES)}"
        )
    return _TYPES[parameter.dtype]
