"""Tables on devices for tests, and the same tables on servers as their oracle."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest, read_manifest, write_manifest
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.kernels import plain_kernels
from torchfleet.ps.gpu.kernels.kernel_choice import Kernels
from torchfleet.ps.gpu.table_saves import TableSaves, described_tables, write_tables
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

ANY_IDS = np.array([0, 1, -1, 7, 1 << 40, -(1 << 63), -(1 << 63) + 1, (1 << 63) - 1, -2, -3], np.int64)
RULES = {
    "sgd": Rule("sgd", 0.1),
    "sgd bounded": Rule("sgd", 0.1, low=-0.02, high=0.02),
    "adagrad": Rule("adagrad", 0.1, initial_accumulator=0.1, lr_decay=0.1),
    "rowwise_adagrad": Rule("rowwise_adagrad", 0.1, eps=1e-8),
    "adam": Rule("adam", 0.1, eps=1e-8),
    "adam decayed": Rule("adam", 0.1, eps=1e-8, weight_decay=0.1),
    "adamw": Rule("adam", 0.1, eps=1e-8, weight_decay=0.1, decoupled_decay=True),
    "momentum": Rule("sgd", 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": Rule("sgd", 0.1, momentum=0.9, nesterov=True),
    "dampened": Rule("sgd", 0.1, momentum=0.9, options=(("dampening", 0.5),)),
    "rowwise_adagrad momentum": Rule("rowwise_adagrad", 0.1, eps=1e-8, momentum=0.9),
    "rmsprop": Rule("rmsprop", 0.01, eps=1e-2, low=-0.05, high=0.05),
    "rmsprop centered": Rule("rmsprop", 0.1, eps=1e-2, options=(("centered", 1.0),)),
    "rmsprop momentum": Rule("rmsprop", 0.1, eps=1e-2, momentum=0.9, options=(("alpha", 0.9),)),
    "rmsprop both": Rule("rmsprop", 0.1, eps=1e-2, momentum=0.9, options=(("centered", 1.0),)),
    "lion": Rule("lion", 0.01, beta2=0.99, weight_decay=0.1, decoupled_decay=True),
    "ftrl": Rule("ftrl", 0.1, options=(("l1", 0.02), ("l2", 0.1))),
    "ftrl power": Rule("ftrl", 0.1, options=(("l1", 0.01), ("lr_power", -0.7))),
}


def spec(**fields: Any) -> TableSpec:
    first = Initializer("uniform", -0.05, 0.05)
    return TableSpec(**{"name": "ads", "dim": 8, "initializer": first, "seed": 3, **fields})


def on_server(described: TableSpec) -> SparseTable:
    return SparseTable(described, 1 << 30)


def kernels_under_test(name: str) -> tuple[Kernels, str]:
    """(kernels, device): Triton's run on a GPU, or without one in its interpreter, if the environment asks for it."""
    if name == "plain":
        return plain_kernels, "cpu"
    pytest.importorskip("triton", reason="needs the package triton")
    has_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not has_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    from torchfleet.ps.gpu.kernels import triton_kernels

    return triton_kernels, "cuda" if has_gpu else "cpu"


def device_table(described: TableSpec, kernels: str, capacity: int = 256, deterministic: bool = False) -> DeviceTable:
    found, device = kernels_under_test(kernels)
    table = DeviceTable(described, device, capacity, deterministic)
    table.kernels = found
    if table.admission is not None and isinstance(table.admission.candidates, DeviceTable):
        table.admission.candidates.kernels = found
    return table


def ids_of(table: DeviceTable, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(table.device)


def assert_one_row_each(table: DeviceTable, ids: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """`ids`, which may repeat, are all that the table has; `slots` and `values`: what it gave for them."""
    num = len(torch.unique(ids))
    assert table.num_rows == num
    assert len(torch.unique(slots)) == num
    assert torch.equal(table.memory.row_keys[slots.long()], ids)
    assert torch.equal(values, table.layout.first_words(ids)[:, : table.dim])
    assert torch.equal(table.find(ids), slots)


def saved(storage: Storage, saves: TableSaves, number: int, mode: Any) -> Manifest:
    """Save, and complete the manifest; a delta continues the save before."""
    before = read_manifest(storage) if mode == "delta" else None
    saves.begin(number, 0 if before is None else before.token, mode)
    parts = write_tables(storage, f"save-{number:06}", 0, {"ads": saves}, mode)
    links = [] if before is None else before.links()
    tables = described_tables({"ads": saves}, mode != "inference")
    kind = "inference" if mode == "inference" else "full"
    made = Manifest(
        f"save-{number:06}", number, kind, 1, tables, parts, token=number, parent=len(links), base=links,
        num_files=len(parts),
    )  # fmt: skip
    write_manifest(storage, made)
    return read_manifest(storage)
