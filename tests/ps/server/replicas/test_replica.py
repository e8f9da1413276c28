"""A primary and its backup on virtual time: what was acknowledged is on the replica that answers, and only one does."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from support.replica_pair import Pair

from torchfleet.base.errors import CoordinatorUnreachable, FleetError, PermissionRefused, ServerUnreachable
from torchfleet.ps.coordination.view import ENDED, Coordinator, View
from torchfleet.ps.net.wire import Command, Message, Role, decode_reply, encode, pack, unpack
from torchfleet.ps.server.replicas.pace import BEAT, PATIENCE
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))
KEYS = np.arange(200, dtype=np.uint64)
START = 3.0  # virtual seconds in which a backup is filled, and named


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Both are there, and in step."""
    made = Pair(tmp_path)
    made.start(0)
    made.start(1)
    made.run(START)
    return made


class Counting:
    """A client that counts what it was told to be done."""

    def __init__(self, pair: Pair, timeout: float = 30.0) -> None:
        self._client = Client([pair.client()], patience=Patience(timeout, 3), window=4)
        self._client.create_table(ROWS)
        self.total = 0.0

    def push(self, amount: float = 1.0) -> None:
        self._client.push("rows", KEYS, np.full((len(KEYS), 2), -amount, np.float32)).result()
        self.total += amount

    def check(self) -> None:
        """What was acknowledged is there, once."""
        rows = self._client.pull("rows", KEYS).result()
        assert np.array_equal(rows, np.full((len(KEYS), 2), self.total, np.float32))


def test_workers_are_let_in_when_there_is_a_backup(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.start(0)
    pair.run(START)
    client = Client([pair.client()], names=["server 0"], patience=Patience(5.0, 3))
    unready = client.unready(1.0)
    assert list(unready) == ["server 0"]
    assert "backup" in unready["server 0"]
    backup = pair.start(1)
    assert not backup.is_in_step
    pair.run(START)
    assert backup.is_in_step
    assert client.unready(1.0) == {}
    view = pair.coordinator.read(0)
    assert view is not None
    assert (view.primary[0], view.backup[0]) == ("0", "1")


def test_a_backup_takes_over_with_all_that_was_acknowledged(pair: Pair) -> None:
    client = Counting(pair)
    for _ in range(5):
        client.push()
    before = pair.now
    pair.kill(0)
    client.push()
    assert pair.primary() == 1
    assert pair.now - before < 1.2
    client.check()


def test_workers_that_will_not_wait_for_a_backup_are_let_in(tmp_path: Path) -> None:
    pair = Pair(tmp_path, waits_for_backup=False)
    pair.start(0)
    client = Client([pair.client()], patience=Patience(5.0, 3))
    assert client.unready(1.0) == {}
    assert client.stats()[0]["has_backup"] is False
    pair.start(1)
    pair.run(START)
    assert client.stats()[0]["has_backup"] is True


def test_replicas_that_wait_for_a_core_all_the_time_stay_what_they_are(pair: Pair) -> None:
    """As at load 13: each gets a core every 0.35 s, and the primary misses two turns of three."""
    before = pair.coordinator.read(0)
    client = Counting(pair, timeout=60.0)
    for turn in range(40):
        pair.stopped = {0, 1}
        pair.run(0.3)
        pair.stopped = {0} if turn % 3 else set()
        pair.run(0.06)
    pair.stopped = set()
    assert pair.coordinator.read(0) == before
    client.push()
    client.check()
    pair.kill(0)
    pair.run(6.0)
    assert pair.primary() == 1, "a primary that is dead is replaced, also where messages were late"


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(pair: Pair) -> None:
    client = Counting(pair)
    pair.is_one_machine = True
    pair.kill(0)
    before = pair.now
    client.push()
    assert pair.now - before < 0.6, "sooner than by silence"
    assert pair.primary() == 1
    pair.start(0)
    pair.run(START)
    pair.kill(0)  # the backup now
    before = pair.now
    client.push()
    assert pair.now - before < 1.0, "sooner than by silence"
    client.check()


def test_a_loss_that_the_launcher_tells_of_is_not_waited_for(pair: Pair) -> None:
    client = Counting(pair)
    client.push()
    pair.kill(0)
    before = pair.now
    tell(pair, 1, lost=0)
    client.push()
    assert pair.now - before < 0.5
    client.check()


def test_a_change_whose_answer_was_lost_with_the_primary_is_made_once(pair: Pair) -> None:
    client = Counting(pair)
    pair.cut.add((0, -1))  # it receives, and what it sends is lost
    future = client._client.push("rows", KEYS, np.full((len(KEYS), 2), -3.0, np.float32))
    pair.run(0.1)
    pair.kill(0)
    future.result()
    client.total = 3.0
    client.check()


def test_a_primary_that_was_stopped_acknowledges_nothing(pair: Pair) -> None:
    client, other = Counting(pair), Counting(pair)
    client.push()
    pair.stopped.add(0)
    late = Client([pair.client()], patience=Patience(5.0, 0))
    late.attach(ROWS)
    asked = late.push("rows", KEYS, np.full((len(KEYS), 2), -100.0, np.float32)), late.pull("rows", KEYS)
    client.push()
    assert pair.primary() == 1
    pair.stopped.clear()
    old = pair.replicas[0]
    assert old is not None
    pair.run(PATIENCE + 2)
    assert old.deposed
    asked[0].result()  # by the new one: it was sent there again
    client.total += 100
    assert np.array_equal(asked[1].result()[:, 0] >= 2.0, np.ones(len(KEYS), bool)), "not what the old one had"
    client.check()
    other.total = client.total
    other.check()


def test_a_primary_goes_on_without_its_backup_and_fills_a_new_one(pair: Pair) -> None:
    client = Counting(pair)
    client.push()
    pair.kill(1)
    before = pair.now
    client.push()
    assert PATIENCE <= pair.now - before < PATIENCE + 1, "an acknowledgement waits for a backup that may be there"
    view = pair.coordinator.read(0)
    assert view is not None
    assert view.backup == ""
    pair.start(1)
    for _ in range(5):
        client.push()
        pair.run(0.2)
    pair.run(START)
    pair.kill(0)
    client.push()
    client.check()


def test_a_backup_that_is_not_in_step_does_not_take_over(pair: Pair) -> None:
    client = Counting(pair, timeout=3.0)
    client.push()
    pair.kill(1)
    client.push()
    pair.start(1)
    pair.cut.add((1, 0))  # it is filled, and can confirm nothing
    pair.run(0.1)
    pair.kill(0)
    with pytest.raises(ServerUnreachable):
        client.push()
    assert pair.primary() is None


class MuteStore:
    """A coordinator that does what a primary asks for, and whose answers are lost from the next change on."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def read(self, shard: int) -> View | None:
        raise CoordinatorUnreachable("the answer is lost")

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        self._coordinator.replace(shard, before, after)
        raise CoordinatorUnreachable("the answer is lost")

    def renew(self) -> None:
        raise CoordinatorUnreachable("the answer is lost")


def test_a_primary_that_does_not_know_whether_it_has_a_backup_does_not_go_on_without(pair: Pair) -> None:
    client = Counting(pair)
    pair.kill(1)
    client.push()  # alone now
    old = pair.replicas[0]
    assert old is not None
    assert old._primary is not None
    old._primary._coordinator = MuteStore(pair.coordinator)
    pair.start(1)
    pair.run(START)
    view = pair.coordinator.read(0)
    assert view is not None
    assert view.backup[0] == "1", "it is named, and its primary was not told"
    pair.cut |= {(0, 1), (1, 0)}
    pair.run(PATIENCE + 1)
    assert pair.replicas[1] is not None
    assert pair.replicas[1].is_primary
    assert not old._primary.is_sure(pair.now), "the other one has taken over"
    client.push()
    client.check()


@pytest.mark.parametrize("seed", range(6))
def test_replicas_that_cannot_hear_each_other_never_both_acknowledge(tmp_path: Path, seed: int) -> None:
    """Links fail one way or both, processes stop and die, at random; one that ended begins anew."""
    dice, pair = random.Random(seed), Pair(tmp_path)
    pair.start(0)
    pair.start(1)
    pair.run(START)
    client = Counting(pair, timeout=60.0)
    links = [(0, 1), (1, 0), (0, -1), (1, -1), (-1, 0), (-1, 1)]
    for _ in range(12):
        fault = dice.choice(["cut", "stop", "kill", "none"])
        view = pair.coordinator.read(0)
        assert view is not None
        if fault == "cut":
            pair.cut = set(dice.sample(links[:2], dice.randint(1, 2))) | set(dice.sample(links, 1))
        elif fault == "stop":
            pair.stopped = {dice.randrange(2)}
        elif fault == "kill" and view.backup:
            pair.kill(dice.randrange(2))
        future = client._client.push("rows", KEYS, np.full((len(KEYS), 2), -1.0, np.float32))
        pair.run(dice.uniform(0.0, 2.5))
        pair.cut, pair.stopped = set(), set()
        begin_anew(pair)
        future.result()
        client.total += 1
        for _ in range(3):
            pair.run(1.0)
            begin_anew(pair)
    client.check()


def begin_anew(pair: Pair) -> None:
    """As the launcher does: what was killed or deposed is started again."""
    for number, replica in enumerate(pair.replicas):
        if replica is None or replica.deposed:
            pair.start(number)


def tell(pair: Pair, to: int, lost: int) -> None:
    channel = pair.client()._channels[to]
    body = pack({"replica": lost, "restart": pair.restarts[lost]})
    pair.send(-1, to, channel, encode(Message(Command.LOST, Role.LAUNCHER, arrays=[body])), Role.LAUNCHER)


@pytest.mark.parametrize("command", [Command.APPEND, Command.FOLLOW, Command.LOST])
def test_a_worker_cannot_speak_for_a_server(pair: Pair, command: Command) -> None:
    for number in range(2):
        replica = pair.replicas[number]
        assert replica is not None
        ((_, frames),) = replica.handle("peer", encode(Message(command)), Role.FIRST_WORKER)
        assert unpack(decode_reply(frames).arrays[0], dict)["kind"] == PermissionRefused.__name__


def test_at_the_end_of_a_job_the_backup_ends_too(tmp_path: Path) -> None:
    pair = Pair(tmp_path, num_workers=1)
    first, second = pair.start(0), pair.start(1)
    pair.run(START)
    client = Client([pair.client(Role.LAUNCHER)], role=Role.LAUNCHER, patience=Patience(5.0, 3))
    client.leave()
    assert first.is_stopping
    first.end()
    pair.kill(0)
    pair.run(0.2)
    assert second.is_stopping
    assert not second.is_primary
    view = pair.coordinator.read(0)
    assert view is not None
    assert view.primary == ENDED


def test_a_server_that_was_lost_alone_says_so(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.start(0)
    pair.run(0.5)
    pair.kill(0)
    pair.start(0)
    with pytest.raises(FleetError, match="backup"):
        pair.run(0.5)


def test_terms_that_a_worker_makes_up_cost_few_looks_at_the_coordinator(pair: Pair) -> None:
    reads, read = [], pair.coordinator.read
    pair.coordinator.read = lambda shard: reads.append(shard) or read(shard)  # type: ignore[method-assign, func-returns-value]
    sender, number = pair.client()._channels[0], pair.primary()
    assert number is not None
    for call in range(200):
        forged = Message(Command.PING, Role.WORKER, call=call, term=1000 + call)
        pair.send(-1, number, sender, encode(forged), Role.WORKER)
        pair.run(0.005)
    assert len(reads) <= 1 + 200 * 0.005 / BEAT
    assert pair.primary() == number


class TestDesertion:
    """All workers are lost: both replicas end, with one reason, and not as if the workers had left."""

    REASON = "worker 0 (here, pid 1) has ended without fleet.stop_worker()"

    def desert(self, pair: Pair) -> None:
        """As ServerRun does it, when the primary's server has found that its workers are lost."""
        server, primary = pair.servers[0], pair.replicas[0]
        assert server is not None
        assert primary is not None
        server.desertion, server.state.is_stopping = self.REASON, True
        assert primary.is_stopping
        primary.end()
        pair.replicas[0] = None
        pair.run(5.0)

    def test_the_backup_ends_with_the_reason_of_its_primary(self, pair: Pair) -> None:
        self.desert(pair)
        backup = pair.replicas[1]
        assert backup is not None
        assert backup.is_stopping
        assert not backup.is_primary
        assert not backup.is_over
        assert pair.servers[1] is not None
        assert pair.servers[1].desertion == self.REASON
        view = pair.coordinator.read(0)
        assert view is not None
        assert view.deserted == self.REASON

    def test_a_replica_that_is_started_again_without_a_log_does_not_begin_without_rows(self, pair: Pair) -> None:
        self.desert(pair)
        again = pair.start(0)
        pair.run(5.0)
        assert not again.is_primary
        assert again.is_stopping
        assert pair.servers[0] is not None
        assert pair.servers[0].desertion == self.REASON
