"""What does not fit into a table with a capacity is refused before anything of its message is applied."""

from __future__ import annotations

import numpy as np
import pytest
from support.fleets import Talk, assert_ok, keys_of, refusal, values_of
from support.messages import names

from torchfleet.ps.net.wire import SYNC, Array, Command
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import AdmissionEntry, CountFilterEntry, Shrink
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

ROWS = 10
FREE = TableSpec("free", dim=1, rule=Rule("sgd", lr=1.0))
DENSE = TableSpec("dense", "dense", size=2, rule=Rule("sgd", lr=1.0))


def capped(entry: AdmissionEntry = AdmissionEntry()) -> TableSpec:  # noqa: B008
    return TableSpec("capped", dim=1, rule=Rule("sgd", lr=1.0), entry=entry, shrink=Shrink(max_rows=ROWS))


@pytest.fixture
def talk() -> Talk:
    made = Talk(Server(1 << 22, num_workers=2))
    for spec in (DENSE, FREE, capped()):
        made.create(spec)
    made.pull(capped(), np.arange(6))
    return made


def arrays(spec: TableSpec, keys: np.ndarray) -> list[Array]:
    dense = [keys_of(DENSE, []), values_of(DENSE, np.ones((2, 1)))]
    free = [keys_of(FREE, [1, 2]), values_of(FREE, np.ones((2, 1)))]
    own = [keys_of(spec, keys), values_of(spec, np.ones((len(keys), 1)))]
    return [Array(0, np.ones((3, 1))), *dense, *free, *own]


def state_of(talk: Talk) -> list[object]:
    tables = talk.server.state.tables.values()
    return [
        (table.step, table.num_rows, table.num_evicted if isinstance(table, SparseTable) else 0) for table in tables
    ] + [table.whole().tolist() for table in tables if table.spec.is_dense]


# Six keys have rows. These use five of them, and six more: eleven rows at once, where each alone would find room.
TOO_MANY = np.array([0, 1, 2, 3, 4, 100, 101, 102, 103, 104, 105])
ENOUGH = np.array([0, 1, 2, 3, 100, 101, 102, 103, 104, 105, 0, 0])


@pytest.mark.parametrize("flags", [0, SYNC])
def test_a_push_that_needs_too_many_rows_changes_no_table(talk: Talk, flags: int) -> None:
    other, before = Talk(talk.server, client=8, worker=1), state_of(talk)
    (reply,) = talk.send(talk.message(Command.PUSH, *arrays(capped(), TOO_MANY), once=True, flags=flags))
    assert names(refusal(reply)[1], 10, 11)
    assert state_of(talk) == before
    replies = talk.send(talk.message(Command.PUSH, *arrays(capped(), ENOUGH), once=True, flags=flags))
    if flags:
        replies += other.send(other.message(Command.PUSH, *arrays(capped(), ENOUGH), once=True, flags=flags))
    for reply in replies:
        assert_ok(reply)
    assert len(replies) == (2 if flags else 1)


def test_a_step_that_needs_too_many_rows_together_changes_no_table(talk: Talk) -> None:
    """Each worker's keys fit, those of both do not."""
    other, before = Talk(talk.server, client=8, worker=1), state_of(talk)
    assert talk.send(talk.message(Command.PUSH, *arrays(capped(), np.arange(6)), once=True, flags=SYNC)) == []
    replies = other.send(other.message(Command.PUSH, *arrays(capped(), np.arange(100, 106)), once=True, flags=SYNC))
    assert [(names(refusal(reply)[1], 12)) for reply in replies] == [True, True]
    assert state_of(talk) == before


@pytest.mark.parametrize("flags", [0, SYNC])
def test_a_pull_that_would_make_too_many_rows_makes_none(talk: Talk, flags: int) -> None:
    before = state_of(talk)
    reply = talk.ask(Command.PULL, keys_of(FREE, [1, 2, 3]), keys_of(capped(), TOO_MANY), flags=flags)
    assert names(refusal(reply)[1], 11)
    assert state_of(talk) == before
    assert_ok(talk.ask(Command.PULL, keys_of(FREE, [1, 2, 3]), keys_of(capped(), ENOUGH), flags=flags))


def test_keys_that_are_counted_first_wait_where_there_is_no_room() -> None:
    """Six rows are in use, and eight strangers are due: four of them find room."""
    table = SparseTable(capped(CountFilterEntry(2)), 1 << 22)
    for _ in range(2):
        table.pull(np.arange(6, dtype=np.uint64))
    assert table.num_rows == 6
    strangers = np.arange(100, 108, dtype=np.uint64)
    table.pull(strangers)
    assert table.num_rows == 6
    table.pull(np.concatenate([strangers, np.arange(6, dtype=np.uint64)]))
    assert table.num_rows == ROWS
    assert (table.find(np.arange(6, dtype=np.uint64)) >= 0).all()  # rows of this batch make no room for others of it
    table.push(strangers, np.ones((8, 1), np.float32))
    assert table.num_rows == ROWS
