"""Whatever the network does to messages, an appearance is counted once: of pulls, of shows, of shrinks and of times;
and steps that workers make together end alike however their messages travelled. On virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.fleets import Talk, assert_ok, keys_of
from support.lossy import Faults, Network
from support.policy_oracle import DAY, HOUR, Oracle, is_chosen, owner_of
from support.searches import examples

from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import NO_CREATE, SYNC, Command, Frame, Role, pack, unpack
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import (
    CountFilterEntry,
    ProbabilityEntry,
    ShowClickEntry,
    Shrink,
    WindowCountEntry,
    combined,
)
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client, Future
from torchfleet.ps.worker.client.connection import Patience

NUM_SCHEDULES = examples(50)
PATIENT = Patience(timeout=1e5, retries=16)  # so that no message is lost for good
KEYS = list(range(12))
COUNTED = TableSpec(
    "counted",
    dim=1,
    rule=Rule("sgd", lr=1.0),
    initializer=Initializer("constant", 0.5),
    entry=combined([CountFilterEntry(4), ShowClickEntry("show", "click", 1.0)]),
    shrink=Shrink(ttl_days=1, every_hours=1, max_share=1.0),
)
WINDOW = TableSpec("window", dim=1, entry=WindowCountEntry(200, 24.0, 1))
START = 20_000 * DAY


class Busy(Server):
    """Long work is done at once: here no loop runs between two requests."""

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> list[tuple[Peer, list[Frame]]]:
        ready = super().handle(peer, frames, role)
        while self.work() is not None:
            ready += self.tick(0.0)
        return ready

    def table(self, spec: TableSpec) -> Any:
        return self.state.tables[spec.number]


def candidates(servers: Sequence[Busy]) -> dict[int, tuple[int, float, float]]:
    """count, show and click of keys without a row."""
    found = {}
    for server in servers:
        for keys, columns in server.table(COUNTED).admission.candidates.chunks(100, only_changed=False):
            lines = zip(*(columns[name].tolist() for name in ("count", "show", "click")), strict=True)
            found.update(zip(keys.tolist(), lines, strict=True))
    return found


def rows(servers: Sequence[Busy]) -> dict[int, tuple[float, float, float]]:
    """value, show and click of rows."""
    found = {}
    for server in servers:
        for keys, values, columns in server.table(COUNTED).chunks():
            lines = zip(values[:, 0].tolist(), columns["show"].tolist(), columns["click"].tolist(), strict=True)
            found.update(zip(keys.tolist(), lines, strict=True))
    return found


class Schedule:
    """Two clients' random requests through a bad network, and an oracle that sees each of them once.

    Several pulls are under way at a time, in any order: counts do not depend on it. What does waits for them.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        rates = [self._dice.uniform(0, 0.2) for _ in range(3)]
        faults = Faults(lose=rates[0], repeat=rates[1], delay=self._dice.uniform(0.01, 0.5), refuse=rates[2] / 2)
        self.network = Network(seed, faults)
        self.servers = [Busy(max_table_bytes=1 << 16) for _ in range(self._dice.randint(1, 3))]
        self._channels = [[self.network.connect(server) for server in self.servers] for _ in range(2)]
        self._clients = [
            Client(channels, patience=PATIENT, window=self._dice.randint(1, 6), worker=worker)
            for worker, channels in enumerate(self._channels)
        ]
        self._current = self._clients[0]
        self._open: list[Future[Any]] = []
        self._asked: Counter[int] = Counter()  # training pulls by key
        self.oracle = Oracle(COUNTED.entry, COUNTED.shrink, 1, 1.0, 0.5)

    def run(self, num_steps: int) -> None:
        for client in self._clients:
            client.create_table(COUNTED)
            client.create_table(WINDOW)
        self._set_time(START)
        for _ in range(num_steps):
            steps = [self._pull, self._predict, self._push, self._cut, self._pass_time, self._shrink]
            (step,) = self._dice.choices(steps, (8, 2, 3, 2, 1, 0.5))
            step()
        self._settle()
        self.network.deliver_all()  # copies that are late come in the end
        self.compare()

    def _client(self) -> Client:
        """The other one at times; not while there is something to wait for, which would not be asked for again."""
        if self._dice.random() < 0.3:
            self._settle()
            self._current = self._dice.choice(self._clients)
        return self._current

    def _pull(self) -> None:
        keys = self._dice.sample(KEYS, self._dice.randint(1, 6))
        self._open.append(self._client().pull_tables({"counted": keys, "window": keys}))
        self.oracle.pull(keys)
        self._asked.update(keys)

    def _predict(self) -> None:
        self._open.append(self._client().pull("counted", self._dice.sample(KEYS, 3), create=False))

    def _push(self) -> None:
        """Waited for: what it changes depends on which rows there are."""
        self._settle()
        keys = self._dice.sample(KEYS, self._dice.randint(1, 6))
        grads = np.full((len(keys), 1), -1.0, np.float32)
        shows = [(self._dice.randint(0, 2), self._dice.randint(0, 1), 0) for _ in keys]
        self._client().push("counted", keys, np.concatenate([grads, np.array(shows, np.float32)], axis=1)).result()
        self.oracle.push(keys, grads, shows)

    def _cut(self) -> None:
        self._dice.choice(self._dice.choice(self._channels)).reconnect()

    def _pass_time(self) -> None:
        self._settle()
        self._set_time(self.oracle.now + self._dice.choice([60, HOUR, 9 * HOUR]))

    def _set_time(self, now: int) -> None:
        dropped = self._clients[0].set_clock(now)
        assert sum(dropped.values()) == self.oracle.set_time(now, len(self.servers))

    def _shrink(self) -> None:
        self._settle()
        policy = Shrink(ttl_days=0.25)
        assert self._clients[0].shrink("counted", policy) == {"counted": self.oracle.evict(policy, None, 1)}

    def _settle(self) -> None:
        for future in self._open:
            future.result()
        self._open.clear()

    def compare(self) -> None:
        known = self.oracle.candidates.items()
        assert candidates(self.servers) == {key: (k.count, float(k.show), float(k.click)) for key, k in known}
        expected = self.oracle.rows.items()
        assert rows(self.servers) == {key: (float(r.value[0]), float(r.show), float(r.click)) for key, r in expected}
        for server_number, server in enumerate(self.servers):  # what the window has counted: one more gives it away
            own = [key for key in KEYS if owner_of(key, len(self.servers)) == server_number]
            counts = server.table(WINDOW).admission.sketch.count(np.array(own, np.uint64), self.oracle.now)
            if self.oracle.now < START + 18 * HOUR:  # all is within the window
                assert counts.tolist() == [self._asked[key] + 1 for key in own]


def test_every_appearance_is_counted_once_whatever_the_network_does() -> None:
    num_retries = 0
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(seed)
        try:
            schedule.run(25)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        num_retries += sum(client.num_retries for client in schedule._clients)
    assert num_retries > NUM_SCHEDULES, "the networks were not bad enough to show anything"


class TestLateCopies:
    """A copy of an old request arrives when much has happened since."""

    @pytest.fixture
    def talk(self) -> Talk:
        talk = Talk(Busy(1 << 16))
        talk.create(COUNTED)
        return talk

    @pytest.mark.parametrize("is_settled", [True, False], ids=["below the floor", "above the floor"])
    def test_a_pull_counts_no_more_and_reads_what_is_there_now(self, talk: Talk, is_settled: bool) -> None:
        first = talk.message(Command.PULL, keys_of(COUNTED, [1, 2]), once=True)
        (reply,) = talk.send(first)
        assert reply.arrays[0].data.tolist() == [[0], [0]]
        floor = {} if is_settled else {"floor": 1}
        for _ in range(2):
            talk.pull(COUNTED, [1], once=True, **floor)
        for _ in range(3):
            (again,) = talk.send(first)
            assert again.arrays[0].data.tolist() == [[0], [0]]
        assert {key: known[0] for key, known in candidates([talk.server]).items()} == {1: 3, 2: 1}
        assert talk.pull(COUNTED, [1], once=True, **floor).tolist() == [[0.5]]
        (again,) = talk.send(first)
        assert again.arrays[0].data.tolist() == [[0.5], [0]]
        assert {key: known[0] for key, known in candidates([talk.server]).items()} == {2: 1}

    def test_a_pull_for_prediction_counts_nothing(self, talk: Talk) -> None:
        for _ in range(10):
            talk.pull(COUNTED, [1], flags=NO_CREATE)
        assert candidates([talk.server]) == {}

    def test_the_same_pull_of_another_client_is_another_appearance(self, talk: Talk) -> None:
        for client in (100, 101, 102, 103):
            Talk(talk.server, client=client).pull(COUNTED, [1], once=True)
        assert set(rows([talk.server])) == {1}

    def test_a_time_that_was_set_before_is_not_set_again(self, talk: Talk) -> None:
        """Nor does it make a shrink due once more."""
        times = [START, START + HOUR, START + HOUR + 60]
        messages = [
            talk.message(Command.CLOCK, pack({"now": now, "token": token})) for token, now in enumerate(times, 1)
        ]
        assert_ok(talk.send(messages[0])[0])
        for _ in range(4):
            talk.pull(COUNTED, [1], once=True)
        assert_ok(talk.send(messages[1])[0])
        late = talk.message(Command.CLOCK, pack({"now": START + 2 * DAY, "token": 7}))
        assert unpack(talk.send(late)[0].arrays[0], dict) == {"counted": 1}  # due: the row is too old
        for message in messages[:2]:
            assert unpack(talk.send(message)[0].arrays[0], dict) == ({} if message is messages[0] else {"counted": 0})
            assert talk.server.state.clock.now == START + 2 * DAY
        for _ in range(4):
            talk.pull(COUNTED, [1], once=True)
        again = talk.message(Command.CLOCK, pack({"now": START + 2 * DAY + 60, "token": 8}))
        assert unpack(talk.send(again)[0].arrays[0], dict) == {}  # the same hour

    def test_a_shrink_is_made_once_and_tells_the_same_again(self, talk: Talk) -> None:
        for _ in range(4):
            talk.pull(COUNTED, [1, 2, 3], once=True)
        body = pack({"table": "counted", "policy": {"where": "norm < 1"}, "token": 5})
        message = talk.message(Command.SHRINK, body)
        assert unpack(talk.send(message)[0].arrays[0], dict) == {"counted": 3}
        for _ in range(4):
            talk.pull(COUNTED, [1], once=True)
        assert unpack(talk.send(message)[0].arrays[0], dict) == {"counted": 3}
        assert set(rows([talk.server])) == {1}


def end_all(workers: Sequence[Client], futures: Sequence[Future[Any]]) -> None:
    """All workers wait at once, as processes do: each asks again for what it does not get."""
    while not all(future.is_done for future in futures):
        for worker in workers:
            for connection in worker._connections:
                connection._work()
    for future in futures:
        future.result()


def run_together(seed: int, faults: Faults) -> list[Any]:
    """Two workers in steps that they make together; returns what the servers hold in the end."""
    network, dice = Network(seed, faults), random.Random(seed)
    servers = [Busy(1 << 16, num_workers=2) for _ in range(2)]
    workers = [Client([network.connect(s) for s in servers], patience=PATIENT, worker=worker) for worker in range(2)]
    for worker in workers:
        worker.create_table(COUNTED)
    workers[0].set_clock(START)
    plans = np.random.default_rng(1)  # the same in every run; only the network differs
    for _ in range(12):
        batches = [plans.choice(40, 5, replace=False) for _ in workers]
        grads = [np.concatenate([plans.normal(size=(5, 1)), plans.integers(0, 3, (5, 3))], axis=1) for _ in workers]
        order = dice.sample(range(2), 2)
        pulls = [workers[w].pull_tables({"counted": batches[w]}, in_step=True) for w in order]
        end_all(workers, pulls)
        order = dice.sample(range(2), 2)
        pushes = [
            workers[w].push_tables({"counted": (batches[w], grads[w].astype(np.float32))}, flags=SYNC) for w in order
        ]
        end_all(workers, pushes)
    network.deliver_all()
    return [rows(servers), candidates(servers)]


def test_steps_that_workers_make_together_do_not_depend_on_the_order_of_their_messages() -> None:
    expected = run_together(0, Faults())
    assert expected[0]
    assert expected[1]
    for seed in range(1, 25):
        faults = Faults(lose=0.2, repeat=0.2, delay=0.3, refuse=0.1)
        assert run_together(seed, faults) == expected, f"network {seed}"


def test_chance_is_the_same_for_every_client_server_and_time() -> None:
    """ProbabilityEntry: of many keys the share p, each decided by its hash alone."""
    spec = TableSpec("chance", dim=1, entry=ProbabilityEntry(0.3), initializer=Initializer("constant", 1.0))
    keys = np.random.default_rng(0).integers(0, 2**64, 3000, np.uint64)
    expected = [is_chosen(key, 0.3) for key in keys.tolist()]
    for num_servers in (1, 3):
        network = Network(1, Faults())
        client = Client([network.connect(Busy(1 << 20)) for _ in range(num_servers)], patience=PATIENT)
        client.create_table(spec)
        for _ in range(2):
            assert (client.pull("chance", keys).result()[:, 0] == 1).tolist() == expected
    assert 0.27 < np.mean(expected) < 0.33
