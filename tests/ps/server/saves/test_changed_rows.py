"""SUBSCRIBE: a process that applies the replies has the tables of the moment of the last one, whatever is lost."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
from support.fleets import MAX_TABLE_BYTES, Talk, assert_ok, keys_of, refusal, values_of

from torchfleet.ps.net.wire import Command, Role, pack, unpack
from torchfleet.ps.server.saves import changed_rows
from torchfleet.ps.server.saves.changed_rows import ChangedBody
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state import pending, subscriptions
from torchfleet.ps.tables import tiered_table
from torchfleet.ps.tables.settings.policy import CountFilterEntry, Shrink, combined
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.table import Table
from torchfleet.ps.tables.tiers import tiers

UNIFORM = Initializer("uniform", -1.0, 1.0)
PACKED = TableSpec("packed", dim=2, initializer=UNIFORM)
WIDE = TableSpec("wide", dim=16, rule=Rule("adagrad", lr=0.1), initializer=UNIFORM)
SIZED = TableSpec("sized", "array", dim=3, size=500, initializer=UNIFORM)
COUNTED = TableSpec(
    "counted", dim=2, initializer=UNIFORM, entry=combined([CountFilterEntry(2)]), shrink=Shrink(max_rows=60)
)
DENSE = TableSpec("dense", "dense", size=6)


class Mirror:
    """What a subscriber has of a server."""

    def __init__(self, server: Server, subscriber: int | None = None) -> None:
        self.server, self.talk = server, Talk(server, client=secrets.randbits(30), role=Role.WORKER)
        self.subscriber, self.received = subscriber or secrets.randbits(62), 0
        self.rows: dict[int, dict[int, bytes]] = {}
        self.blocks: dict[int, bytes] = {}

    def ask(self) -> tuple[ChangedBody, list[np.ndarray]]:
        body = pack({"subscriber": self.subscriber, "received": self.received})
        reply = self.talk.ask(Command.SUBSCRIBE, body)
        assert_ok(reply)
        return unpack(reply.arrays[0], ChangedBody), [array.data for array in reply.arrays[1:]]

    def begin(self) -> None:
        """Read everything, after the subscription has begun."""
        body, arrays = self.ask()
        assert (body.is_known, body.number, arrays) == (False, 1, [])
        self.received = body.number
        self.rows = {number: contents(table) for number, table in self.server.state.tables.items()}
        self.blocks = {n: block_of(table) for n, table in self.server.state.tables.items() if table.spec.is_dense}

    def take(self) -> ChangedBody:
        body, arrays = self.ask()
        assert body.is_known
        self.received = body.number
        for i, number in enumerate(body.rows):
            keys, values, gone = arrays[3 * i : 3 * i + 3]
            held = self.rows.setdefault(number, {})
            for key in gone.reshape(-1).tolist():
                held.pop(key, None)
            held.update({key: row.tobytes() for key, row in zip(keys.reshape(-1).tolist(), values, strict=True)})
        for number, block in zip(body.blocks, arrays[3 * len(body.rows) :], strict=True):
            self.blocks[number] = block.tobytes()
        return body

    def take_all(self) -> int:
        """Ask until nothing is left; returns how many replies that took."""
        num = 1
        while self.take().rest:
            num += 1
        return num

    def assert_exact(self) -> None:
        for number, table in self.server.state.tables.items():
            if table.spec.is_dense:
                assert self.blocks[number] == block_of(table)
            else:
                assert self.rows.get(number, {}) == contents(table)


def block_of(table: Table) -> bytes:
    block = table.whole()
    assert block is not None
    return block.tobytes()


def contents(table: Table) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    cursor = -1
    while cursor and not table.spec.is_dense:
        keys, values, cursor = table.walk(max(cursor, 0), 1 << 10)
        found.update({key: row.tobytes() for key, row in zip(keys.tolist(), values, strict=True)})
    return found


@pytest.fixture
def server() -> Server:
    return Server(MAX_TABLE_BYTES)


@pytest.fixture
def trainer(server: Server) -> Talk:
    return Talk(server, client=5)


def train(trainer: Talk, spec: TableSpec, rng: np.random.Generator, num_steps: int = 8) -> None:
    """Pulls that make rows, pushes, rows that are set and rows that are removed."""
    for _ in range(num_steps):
        keys = rng.integers(0, 300, 40).astype(np.uint64)
        trainer.pull(spec, keys)
        assert_ok(trainer.push(spec, keys, rng.standard_normal((len(keys), spec.dim)).astype(np.float32)))
        if spec is not SIZED:
            assert_ok(trainer.ask(Command.ERASE, keys_of(spec, rng.integers(0, 300, 10)), once=True))
    some = np.unique(rng.integers(0, 300, 20))
    values = rng.standard_normal((len(some), spec.dim)).astype(np.float32)
    assert_ok(trainer.ask(Command.SET, keys_of(spec, some), values_of(spec, values), once=True))


@pytest.mark.parametrize("spec", [PACKED, WIDE, SIZED, COUNTED], ids=lambda spec: spec.name)
def test_a_subscriber_has_the_rows_of_the_last_reply(server: Server, trainer: Talk, spec: TableSpec) -> None:
    rng = np.random.default_rng(3)
    trainer.create(spec)
    train(trainer, spec, rng)
    mirror = Mirror(server)
    mirror.begin()
    for _ in range(5):
        train(trainer, spec, rng, 3)
        assert mirror.take_all() == 1
        mirror.assert_exact()
    body = mirror.take()
    assert (body.rows, body.rest) == ([], 0)


def test_rows_on_disk_are_told_as_well(
    server: Server, trainer: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers.Tiers, "max_hot", property(lambda _: 700))
    monkeypatch.setattr(tiered_table, "FEWEST_ROWS", 1)
    spec = TableSpec("tiered", dim=8, initializer=UNIFORM, storage=TierStorage(64 << 20, str(tmp_path)))
    trainer.create(spec)
    mirror, rng = Mirror(server), np.random.default_rng(0)
    mirror.begin()
    for start in range(0, 6000, 200):
        keys = np.arange(start, start + 200, dtype=np.uint64)
        trainer.pull(spec, keys)
        assert_ok(trainer.push(spec, keys, rng.standard_normal((len(keys), 8)).astype(np.float32)))
    assert_ok(trainer.ask(Command.ERASE, keys_of(spec, np.arange(0, 6000, 37)), once=True))
    assert server.state.table(spec.number).stats()["cold_rows"]
    mirror.take_all()
    mirror.assert_exact()


def test_a_dense_table_is_told_when_it_changed(server: Server, trainer: Talk) -> None:
    trainer.create(DENSE)
    mirror = Mirror(server)
    mirror.begin()
    assert mirror.take().blocks == []
    block = np.arange(6, dtype=np.float32).reshape(-1, 1)
    assert_ok(trainer.ask(Command.SET, keys_of(DENSE, [0]), values_of(DENSE, block), once=True))
    assert mirror.take().blocks == [DENSE.number]
    mirror.assert_exact()
    assert_ok(trainer.push(DENSE, [], block))
    assert mirror.take().blocks == [DENSE.number]
    mirror.assert_exact()
    assert mirror.take().blocks == []


def test_a_reply_is_bounded_and_the_last_one_is_exact(
    server: Server, trainer: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_rows, "MAX_NUMBERS", 64)
    for spec in (WIDE, PACKED, DENSE):
        trainer.create(spec)
    mirror, rng = Mirror(server), np.random.default_rng(1)
    mirror.begin()
    train(trainer, WIDE, rng)
    train(trainer, PACKED, rng)
    assert mirror.take().rest > 0
    train(trainer, WIDE, rng, 1)  # rows that were told already change again
    assert mirror.take_all() > 5
    mirror.assert_exact()


def test_replies_that_are_lost_come_again(server: Server, trainer: Talk) -> None:
    trainer.create(WIDE)
    trainer.create(DENSE)
    mirror, rng = Mirror(server), np.random.default_rng(2)
    mirror.begin()
    for lost in (1, 2, 0, 3):
        train(trainer, WIDE, rng, 2)
        assert_ok(trainer.push(DENSE, [], rng.standard_normal((6, 1)).astype(np.float32)))
        for _ in range(lost):
            mirror.ask()
        mirror.take_all()
        mirror.assert_exact()


def test_a_late_copy_of_the_first_request_loses_nothing(server: Server, trainer: Talk) -> None:
    trainer.create(WIDE)
    mirror = Mirror(server)
    mirror.begin()
    train(trainer, WIDE, np.random.default_rng(0), 2)
    body = pack({"subscriber": mirror.subscriber, "received": 0})
    assert_ok(mirror.talk.ask(Command.SUBSCRIBE, body))
    mirror.take_all()
    mirror.assert_exact()


def test_several_subscribers_do_not_disturb_each_other(server: Server, trainer: Talk) -> None:
    trainer.create(PACKED)
    mirrors, rng = [Mirror(server) for _ in range(3)], np.random.default_rng(4)
    for mirror in mirrors:
        mirror.begin()
        train(trainer, PACKED, rng, 2)
    mirrors[0].take_all()
    train(trainer, PACKED, rng, 2)
    for mirror in mirrors:
        mirror.take_all()
        mirror.assert_exact()


def test_an_unknown_subscriber_is_told_so(server: Server, trainer: Talk) -> None:
    trainer.create(PACKED)
    mirror = Mirror(server)
    mirror.received = 17  # of a server that was here before
    body, arrays = mirror.ask()
    assert (body.is_known, body.number, arrays) == (False, 1, [])


def test_a_silent_subscriber_is_forgotten(server: Server, trainer: Talk) -> None:
    now = 100.0
    server.state.now = lambda: now
    trainer.create(PACKED)
    mirror = Mirror(server)
    mirror.begin()
    now += subscriptions.LEASE + 1.0
    server.tick(now)
    assert len(server.state.subscriptions) == 0
    assert not mirror.ask()[0].is_known


def test_too_many_subscribers_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MAX_SUBSCRIBERS", 2)
    for _ in range(2):
        Mirror(server).ask()
    third = Mirror(server)
    reply = third.talk.ask(Command.SUBSCRIBE, pack({"subscriber": 3, "received": 0}))
    assert refusal(reply)[0] == "ServerBusy"


def test_keys_that_wait_for_a_subscriber_do_not_pile_up(server: Server, trainer: Talk) -> None:
    trainer.create(PACKED)
    mirror = Mirror(server)
    mirror.begin()
    keys = np.arange(1000, dtype=np.uint64)
    trainer.pull(PACKED, keys)
    for _ in range(300):
        assert_ok(trainer.push(PACKED, keys, np.ones((1000, 2), np.float32)))
    (found,) = server.state.subscriptions._known.values()
    assert found.rows[PACKED.number].num <= 2 * pending.COMPACT_AT
