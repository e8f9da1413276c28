"""Saves of tables on devices: full, deltas with deleted rows, beside training; read by tables on servers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.device_tables import ANY_IDS, RULES, ids_of, on_server, saved, spec
from support.messages import naming

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.checkpoint.part_reader import load_sparse
from torchfleet.ps.gpu import table_saves
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_saves import TableSaves

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def push(table: DeviceTable, ids: np.ndarray[Any, Any], seed: int) -> None:
    grads = np.random.default_rng(seed).normal(0, 0.2, (len(ids), table.dim)).astype(np.float32)
    table.push(table.find(ids_of(table, ids), insert=True), torch.from_numpy(grads).to(table.device))


def rows_of(table: Any) -> dict[int, bytes]:
    if isinstance(table, DeviceTable):
        blocks = [block.arrays() for block in table.rows()]
        pairs = [(block["keys"], block["rows"]) for block in blocks]
    else:
        pairs = [(keys, rows) for keys, rows, _ in table.chunks()]
    return {int(key): row.tobytes() for keys, rows in pairs for key, row in zip(keys, rows, strict=True)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_a_chain_of_saves_loads_into_servers_and_devices(
    tmp_path: Path, rule: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_saves, "BLOCK_BYTES", 1 << 11)  # several blocks
    described, storage = spec(rule=RULES[rule]), Storage(str(tmp_path))
    table = DeviceTable(described, device, 64)
    saves = TableSaves(table)
    push(table, np.concatenate([ANY_IDS, np.arange(200, 500)]), 0)
    saved(storage, saves, 1, "full")
    push(table, np.arange(100, 250), 1)
    table.remove(ids_of(table, np.array([7, 205, 300, -(1 << 63)])))
    push(table, np.array([300]), 2)  # a row again, with first values
    manifest = saved(storage, saves, 2, "delta")
    assert sum(part.rows for part in manifest.parts if part.kind == "rows") < 170
    push(table, ANY_IDS[:4], 3)
    manifest = saved(storage, saves, 3, "delta")
    expected, other, server = rows_of(table), DeviceTable(described, device, 16), on_server(described)
    assert load_sparse(storage, manifest, TableSaves(other)) == len(expected)
    load_sparse(storage, manifest, server)
    assert rows_of(other) == rows_of(server) == expected
    assert other.step == server.step == table.step


def test_a_save_for_prediction_has_values_alone(tmp_path: Path) -> None:
    table = DeviceTable(spec(rule=RULES["adam"]), "cpu", 64)
    push(table, np.arange(20), 0)
    manifest = saved(Storage(str(tmp_path)), TableSaves(table), 1, "inference")
    assert manifest.table("ads").num_states == 0
    server = on_server(spec(rule=RULES["sgd"]))
    load_sparse(Storage(str(tmp_path)), manifest, server)
    values = table.find_and_gather(ids_of(table, np.arange(20)))[1]
    np.testing.assert_array_equal(server.look_up(np.arange(20, dtype=np.uint64)), values.numpy())


def test_a_delta_without_a_save_and_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    table = DeviceTable(spec(), "cpu", 64)
    saves = TableSaves(table)
    push(table, np.arange(20), 0)
    with pytest.raises(CheckpointError):
        saves.begin(5, 4, "delta")
    table.memory.rows.segments[0][3, 0] = torch.nan
    with pytest.raises(CheckpointError, match=naming("ads")):
        saved(Storage(str(tmp_path)), saves, 1, "full")


@pytest.mark.gpu
def test_rows_of_a_save_beside_training_are_whole(tmp_path: Path) -> None:
    """Adagrad with gradients of 1: the state of a row tells how often it was updated, and that its value."""
    described, storage = spec(dim=4, rule=RULES["adagrad"]), Storage(str(tmp_path))
    table, num = DeviceTable(described, "cuda", 1 << 20), 1 << 19
    ids = torch.arange(num, device="cuda")
    table.find(ids, insert=True)
    grads, steps = torch.ones(num // 4, 4, device="cuda"), 0
    table.push(table.find(ids[::4]), grads, 0.1)  # compiles the kernels, which takes longer than a save
    saves, done = TableSaves(table), threading.Event()

    def save() -> None:
        saved(storage, saves, 1, "full")
        done.set()

    thread = threading.Thread(target=save)
    thread.start()
    while not done.is_set():
        some = ids[(steps % 4) :: 4]
        table.push(table.find(some), grads, 0.1)
        steps += 1
    thread.join()
    push_state = on_server(described)
    load_sparse(storage, read_manifest(storage), push_state)
    rows = np.concatenate([rows for _, rows, _ in push_state.chunks()])
    assert len(rows) == num
    assert (rows[:, 4:] == rows[:, 4:5]).all()  # no row was cut through the middle
    assert steps > 0
