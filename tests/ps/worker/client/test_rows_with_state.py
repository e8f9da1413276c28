"""Rows with the state of their rule: pulled from one fleet and assigned to another, where training goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.fleets import Fleet, Talk, in_process

from torchfleet.base.errors import TableError
from torchfleet.ps.net.wire import ERROR, STATE, Array, Command
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.worker.client.client import Client

ROWS = TableSpec("rows", dim=3, rule=Rule("adam", 0.1), initializer=Initializer("uniform", -0.1, 0.1))
KINDS = {
    "any id": ROWS,
    "few words": msgspec.structs.replace(ROWS, rule=Rule("sgd", 0.1)),
    "declared": msgspec.structs.replace(ROWS, kind="array", size=200),
}


def grads(seed: int, num: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (num, 3)).astype(np.float32)


def trained(client: Client, spec: TableSpec) -> None:
    client.create_table(spec)
    for step in range(3):
        client.push("rows", np.arange(step, 100), grads(step, 100 - step)).result()


def check_moves(spec: TableSpec, first: Fleet, second: Fleet) -> None:
    source, target, keys = first.client(), second.client(), np.arange(150)
    trained(source, spec)
    target.create_table(spec)
    rows, step = source.pull_rows("rows", keys).result()
    assert rows.shape == (150, spec.num_words)
    assert step == 3
    np.testing.assert_array_equal(rows[:, :3], source.pull("rows", keys).result())
    target.assign_rows("rows", keys, rows, step).result()
    for client in (source, target):
        client.push("rows", keys[::2], grads(9, 75)).result()
    (rows, step), (found, found_step) = (client.pull_rows("rows", keys).result() for client in (source, target))
    np.testing.assert_array_equal(found, rows)
    assert found_step == step == 4


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_where_the_rows_are_assigned(kind: str) -> None:
    with in_process(2) as first, in_process(3) as second:
        check_moves(KINDS[kind], first, second)


def test_rows_on_disk_come_with_their_state(tmp_path: Path) -> None:
    tiered = msgspec.structs.replace(ROWS, storage=TierStorage(64 << 20, str(tmp_path)))
    with in_process(1) as first, in_process(2) as second:
        check_moves(tiered, first, second)


def test_steps_that_do_not_fit_change_nothing(server: Server) -> None:
    talk = Talk(server)
    server.state.add_table(ROWS)
    number, keys = ROWS.number, np.arange(2, dtype=np.uint64).reshape(-1, 1)
    rows = np.ones((2, ROWS.num_words), np.float32)
    for steps in (np.array([[1 << 60]], np.uint64), np.array([[1], [2]], np.uint64), np.ones((1, 1), np.float32)):
        asked = Array(number, keys), Array(number, rows), Array(0, steps)
        assert talk.ask(Command.SET, *asked, once=True, flags=STATE).status == ERROR
    assert server.state.table(number).num_rows == server.state.table(number).step == 0


def test_a_dense_table_has_no_rows_to_give() -> None:
    with in_process(1) as fleet:
        client = fleet.client()
        client.create_table(TableSpec("dense", "dense", size=4))
        with pytest.raises(TableError):
            client.pull_rows("dense", [0, 1]).result()
