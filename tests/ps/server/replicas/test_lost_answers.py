"""Replicas whose coordinator is away, or has done what they asked for without their hearing so, on virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.replica_pair import Pair
from support.shaky_store import ShakyStore

from torchfleet.base.errors import FleetError
from torchfleet.ps.coordination.view import View
from torchfleet.ps.net.wire import Command, Message, Role, encode, pack
from torchfleet.ps.server.replicas.pace import PATIENCE, SILENCE
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client, Future
from torchfleet.ps.worker.client.connection import Patience

ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))
KEYS = np.arange(50, dtype=np.uint64)
START = 3.0  # virtual seconds in which a backup is filled, and named


class ShakyPair(Pair):
    """Two replicas with a shaky store, and a client that counts what it was told to be done."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = self.coordinator
        self.store = ShakyStore(self.files)
        self.coordinator = self.store  # type: ignore[assignment]
        self.total = 0.0

    def begin(self) -> None:
        self.start(0)
        self.start(1)
        self.run(START)
        self.worker = Client([self.client()], patience=Patience(60.0, 3), window=4)
        self.worker.create_table(ROWS)
        self.push().result()

    def push(self) -> Future[None]:
        """Adds one to all rows."""
        self.total += 1
        return self.worker.push("rows", KEYS, np.full((len(KEYS), 2), -1.0, np.float32))

    def check(self) -> None:
        """What was acknowledged is there, once."""
        rows = self.worker.pull("rows", KEYS).result()
        assert np.array_equal(rows, np.full((len(KEYS), 2), self.total, np.float32))

    @property
    def view(self) -> View:
        found = self.files.read(0)
        assert found is not None
        return found

    def tell(self, to: int, lost: int) -> None:
        """As the launcher that sees the end of a process."""
        body = pack({"replica": lost, "restart": self.restarts[lost]})
        sender = self.client()._channels[to]
        self.send(-1, to, sender, encode(Message(Command.LOST, Role.LAUNCHER, arrays=[body])), Role.LAUNCHER)


@pytest.fixture
def unbegun(tmp_path: Path) -> ShakyPair:
    return ShakyPair(tmp_path)


@pytest.fixture
def pair(unbegun: ShakyPair) -> ShakyPair:
    """Both are there, and in step."""
    unbegun.begin()
    return unbegun


def test_a_backup_has_taken_over_though_the_answer_was_lost(pair: ShakyPair) -> None:
    pair.store.loses_next = True
    pair.kill(0)
    pair.run(3.0)
    assert pair.view.primary[0] == "1"
    assert pair.primary() is None, "it does not know yet"
    pair.store.is_away = False
    pair.run(1.0)
    assert pair.primary() == 1
    pair.push().result()
    pair.check()
    pair.start(0)
    pair.run(START)
    assert (pair.view.primary[0], pair.view.backup[0]) == ("1", "0")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_claim_at_the_start_whose_answer_was_lost_is_made_once(unbegun: ShakyPair, is_late: bool) -> None:
    unbegun.store.loses_next, unbegun.store.delays_next = not is_late, is_late
    first = unbegun.start(0)
    unbegun.start(1)
    unbegun.run(2.0)
    assert not first.has_role
    unbegun.store.is_away = False
    unbegun.store.deliver()
    unbegun.run(START)
    assert first.is_primary
    assert unbegun.view == View(2, first._own.name, unbegun.view.backup)
    assert unbegun.view.backup[0] == "1"


def test_replicas_that_start_without_a_coordinator_wait_for_it(unbegun: ShakyPair) -> None:
    unbegun.store.is_away = True
    first, second = unbegun.start(0), unbegun.start(1)
    unbegun.run(60.0)
    assert not first.has_role
    assert not first.is_in_step
    assert not first.is_stopping
    assert not second.is_stopping
    unbegun.store.is_away = False
    unbegun.run(START)
    assert first.is_primary
    assert second.is_in_step


@pytest.mark.parametrize("lost", [0, 1])
def test_a_replica_that_is_restarted_without_a_coordinator_is_a_backup_again(pair: ShakyPair, lost: int) -> None:
    pair.store.is_away = True
    pair.kill(lost)
    pair.tell(1 - lost, lost)
    pair.start(lost)
    pushed = pair.push()
    pair.run(20.0)
    pair.store.is_away = False
    pushed.result()
    pair.run(START)
    assert (pair.view.primary[0], pair.view.backup[0]) == (str(1 - lost), str(lost))
    pair.kill(1 - lost)
    pair.push().result()
    pair.check()


@pytest.mark.parametrize("first", [0, 1])
def test_both_lost_while_there_is_no_coordinator_end_with_an_error(pair: ShakyPair, first: int) -> None:
    pair.store.is_away = True
    for lost in (first, 1 - first):
        pair.kill(lost)
        pair.tell(1 - lost, lost)
        pair.start(lost)
        pair.run(0.1)
    pair.store.is_away = False
    with pytest.raises(FleetError, match="lost"):
        pair.run(20.0)


def test_a_claim_that_comes_late_makes_the_backup_primary_though_the_old_one_is_heard_again(pair: ShakyPair) -> None:
    pair.store.delays_next = True
    pair.stopped.add(0)
    pair.run(SILENCE + 0.3)
    pair.stopped.clear()
    for _ in range(3):
        pair.push().result()
    assert pair.primary() == 0, "nothing was decided"
    pair.store.is_away = False
    pair.run(3.0)
    assert pair.view.primary[0] == "0"
    pair.store.deliver()
    assert pair.view.primary[0] == "1"
    pair.run(5.0)
    assert pair.primary() == 1
    assert pair.replicas[0] is not None
    assert pair.replicas[0].deposed
    pair.start(0)
    pair.run(START)
    pair.kill(1)
    pair.push().result()
    pair.check()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_primary_that_may_have_dropped_its_backup_acknowledges_only_when_it_is_named_again(
    pair: ShakyPair, is_late: bool
) -> None:
    pair.store.loses_next, pair.store.delays_next = not is_late, is_late
    pair.stopped.add(1)
    pair.run(PATIENCE + 0.5)
    assert pair.store.is_away, "the primary has asked to go on alone"
    pair.stopped.clear()  # it answers the signs of life that wait for it
    pushed = pair.push()
    pair.run(2.0)
    assert pair.replicas[0] is not None
    assert pair.replicas[0]._primary is not None
    assert not pair.replicas[0]._primary.is_sure(pair.now), "if it were lost now, its backup could not take over"
    pair.store.is_away = False
    pushed.result()
    pair.store.deliver()
    pair.run(1.0)
    assert (pair.view.primary[0], pair.view.backup[0]) == ("0", "1")
    assert pair.restarts == [0, 0]
    pair.kill(0)
    pair.push().result()
    pair.check()


def test_an_end_whose_answer_was_lost_is_the_end(tmp_path: Path) -> None:
    pair = Pair(tmp_path, num_workers=1)
    store = ShakyStore(pair.coordinator)
    pair.coordinator = store  # type: ignore[assignment]
    first, second = pair.start(0), pair.start(1)
    pair.run(START)
    Client([pair.client(Role.LAUNCHER)], role=Role.LAUNCHER, patience=Patience(5.0, 3)).leave()
    store.loses_next = True
    first.end()
    pair.kill(0)
    pair.run(1.0)
    assert not second.is_stopping
    store.is_away = False
    pair.run(1.0)
    assert second.is_stopping
    assert not second.is_primary
