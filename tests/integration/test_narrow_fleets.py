"""Narrow rows behind real servers: killed with a log, and taken over by a backup, they are those of one table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.fleets import ForkedServer
from support.replica_pair import Pair

from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

KEYS = np.arange(600, dtype=np.uint64)
FORMATS = [RowFormat("bfloat16"), RowFormat("float16", wire="int8"), RowFormat("int8"), RowFormat("int8", "learned")]
all_formats = pytest.mark.parametrize("row_format", FORMATS, ids=str)


def spec_of(row_format: RowFormat) -> TableSpec:
    first = Initializer("uniform", -0.1, 0.1)
    return TableSpec("rows", dim=5, rule=Rule("rowwise_adagrad", lr=0.1), initializer=first, format=row_format)


def train(client: Client, turn: int) -> None:
    grads = np.random.default_rng(turn).normal(size=(len(KEYS), 5)).astype(np.float32)
    client.pull("rows", KEYS).result()
    client.push("rows", KEYS, grads).result()


class Alone:
    """The same pushes in a table of this process."""

    def __init__(self, spec: TableSpec) -> None:
        self._table = SparseTable(spec, 1 << 26)

    def train(self, turn: int) -> None:
        grads = np.random.default_rng(turn).normal(size=(len(KEYS), 5)).astype(np.float32)
        self._table.look_up(KEYS)
        self._table.push(KEYS, grads)

    def rows(self) -> np.ndarray:
        found: np.ndarray = self._table.look_up(KEYS)
        return found


@pytest.mark.slow
@all_formats
def test_a_killed_server_has_the_same_bits_after_its_log(row_format: RowFormat, tmp_path: Path) -> None:
    spec = spec_of(row_format)
    options = ("--durability", "log", "--log_store", str(tmp_path / "log"))
    found: list[np.ndarray] = []
    for start in (0, 3):
        with (
            ForkedServer("tcp://127.0.0.1:0", *options) as server,
            Client([SocketChannel(server.endpoint, None, Role.FIRST_WORKER)]) as client,
        ):
            client.create_table(spec)
            if start:
                assert np.array_equal(client.pull("rows", KEYS).result(), found[-1])
            for turn in range(start, start + 3):
                train(client, turn)
            found.append(client.pull("rows", KEYS).result())
            server.kill()
    if not row_format.wire:  # gradients travel as they are
        oracle = Alone(spec)
        for turn in range(6):
            oracle.train(turn)
        assert np.array_equal(oracle.rows(), found[-1])


@all_formats
def test_a_backup_takes_over_with_the_same_bits(row_format: RowFormat, tmp_path: Path) -> None:
    spec, pair = spec_of(row_format), Pair(tmp_path)
    pair.start(0)
    pair.start(1)
    pair.run(3.0)
    client = Client([pair.client()], patience=Patience(30.0, 3), window=4)
    client.create_table(spec)
    for turn in range(3):
        train(client, turn)
    before = client.pull("rows", KEYS).result()
    pair.kill(0)
    assert np.array_equal(client.pull("rows", KEYS).result(), before)
    assert pair.primary() == 1
    for turn in range(3, 5):
        train(client, turn)
    if not row_format.wire:
        oracle = Alone(spec)
        for turn in range(5):
            oracle.train(turn)
        assert np.array_equal(oracle.rows(), client.pull("rows", KEYS).result())
