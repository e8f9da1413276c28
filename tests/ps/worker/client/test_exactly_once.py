"""Whatever the network does to messages, every change is made once; shown by counting, on virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from support.fleets import Talk, assert_ok, keys_of, push_arrays, values_of
from support.lossy import Faults, Network
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import ServerRestarted, ServerUnreachable, TableError
from torchfleet.ps.net.transport import InProcess
from torchfleet.ps.net.wire import NO_CREATE, Command, encode
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state.sessions import MAX_AHEAD, Outcome, Sessions
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client, Future
from torchfleet.ps.worker.client.connection import Patience

NUM_SCHEDULES = examples(250)
NUM_STEPS = 12
KEYS = np.arange(10, dtype=np.uint64)
ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))
BLOCK = TableSpec("block", "dense", size=5, rule=Rule("sgd", lr=1.0))
PATIENT = Patience(timeout=600.0, retries=10)
HASTY = Patience(timeout=2.0, retries=2)


class Mismatch(AssertionError):
    """A table holds what no order of the changes, each made once, leads to."""


class Schedule:
    """A client's random requests through a bad network, and what the tables may hold at every moment.

    Push number n adds 3^n, so that a sum tells which pushes are in it, and which twice. Several pushes are under way at
    a time; a set or an erase waits for them, for otherwise their order would be open.
    """

    def __init__(self, seed: int, patience: Patience, worst: float) -> None:
        self._dice = random.Random(seed)
        rates = [self._dice.uniform(0, worst) for _ in range(3)]
        faults = Faults(lose=rates[0], repeat=rates[1], delay=self._dice.uniform(0.01, 0.5), refuse=rates[2] / 2)
        self._network = Network(seed, faults)
        self.servers = [Server(max_table_bytes=1 << 14) for _ in range(self._dice.randint(1, 3))]
        self._channels = [self._network.connect(server) for server in self.servers]
        self._client = Client(self._channels, patience=patience, window=self._dice.randint(1, 6))
        self._known = {int(key): {0.0} for key in KEYS}  # key → values that its row may have
        self._block = {0.0}
        self._open: list[tuple[Future, list[int], float]] = []
        self._powers = (3.0**n for n in itertools.count())

    def run(self) -> bool:
        """Whether it came to its end. Raises Mismatch if the tables do not hold what they should."""
        is_complete = True
        try:
            self._client.create_table(ROWS)
            self._client.create_table(BLOCK)
            for _ in range(NUM_STEPS):
                self._step()
            self._settle()
        except ServerUnreachable:
            is_complete = False
        if all(len(server.state.tables) == 2 for server in self.servers):
            self._network.deliver_all()
            self._compare_all()
        return is_complete

    def _step(self) -> None:
        steps: list[Callable[[], None]] = [self._push, self._pull, self._set, self._erase, self._cut]
        (step,) = self._dice.choices(steps, (8, 3, 1, 1, 1))
        step()

    def _push(self) -> None:
        for future, _, _ in [change for change in self._open if change[0].is_done]:
            future.result()  # else the next push would raise an error of this one, and not be sent itself
        keys, amount = self._some_keys(), next(self._powers)
        grads = np.full((len(keys), ROWS.dim), -amount, np.float32)
        future = self._client.push_tables({"rows": (keys, grads), "block": np.full(BLOCK.size, -amount, np.float32)})
        self._open.append((future, [int(key) for key in keys], amount))
        if self._dice.random() < 0.3:
            self._settle()

    def _pull(self) -> None:
        keys = self._some_keys()
        rows = self._client.pull("rows", keys, create=self._dice.random() < 0.5).result()
        for key, row in zip(keys, rows, strict=True):
            _expect(row, self._possible(int(key)), f"pull of key {key}")

    def _set(self) -> None:
        self._settle()
        keys, value = self._some_keys(), self._dice.randint(1, 9) / 16
        self._change(keys, value, lambda: self._client.assign("rows", keys, np.full((len(keys), ROWS.dim), value)))

    def _erase(self) -> None:
        self._settle()
        keys = self._some_keys()
        self._change(keys, 0.0, lambda: self._client.erase("rows", keys))

    def _change(self, keys: np.ndarray, value: float, make: Callable[[], None]) -> None:
        for key in keys:
            self._known[int(key)].add(value)  # until it is answered, both are possible
        make()
        for key in keys:
            self._known[int(key)] = {value}

    def _cut(self) -> None:
        self._dice.choice(self._channels).reconnect()

    def _settle(self) -> None:
        """Wait for all pushes. They then have been made for certain."""
        for future, _, _ in self._open:
            future.result()
        for key in self._known:
            self._known[key] = {value + self._sum_for(key) for value in self._known[key]}
        self._block = {value + sum(amount for _, _, amount in self._open) for value in self._block}
        self._open.clear()

    def _sum_for(self, key: int) -> float:
        return sum(amount for _, keys, amount in self._open if key in keys)

    def _possible(self, key: int) -> set[float]:
        return _with_any_of(self._known[key], [amount for _, keys, amount in self._open if key in keys])

    def _compare_all(self) -> None:
        for server in self.servers:
            rows = server.state.tables[ROWS.number].pull(KEYS, create=False)
            for key, row in zip(KEYS, rows, strict=True):
                owned = self._client._tables["rows"].shard_keys([key]).keys[self.servers.index(server)]
                _expect(row, self._possible(int(key)) if len(owned) else {0.0}, f"key {key} in the end")
            block = server.state.tables[BLOCK.number]
            possible = _with_any_of(self._block, [amount for _, _, amount in self._open])
            _expect(block.get(0, block.size), possible, "the dense block in the end")

    def _some_keys(self) -> np.ndarray:
        return np.array(self._dice.sample(list(KEYS), self._dice.randint(1, 6)), np.uint64)


def _with_any_of(values: set[float], amounts: list[float]) -> set[float]:
    for amount in amounts:
        values = values | {value + amount for value in values}
    return values


def _expect(found: np.ndarray, possible: set[float], what: str) -> None:
    if len(found) and (float(found[0]) not in possible or (found != found[0]).any()):
        raise Mismatch(f"{what}: found {found}, possible are {sorted(possible)}")


def run_all(seeds: range) -> list[int]:
    """The seeds of the schedules that did not come to their end."""
    return [seed for seed in seeds if not Schedule(seed, PATIENT, worst=0.25).run()]


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, NUM_SCHEDULES, 250))
def test_bad_networks_change_nothing_about_the_result(start: int) -> None:
    given_up = run_all(range(start, min(start + 250, NUM_SCHEDULES)))
    assert len(given_up) <= 3, f"these schedules were to come to their end: {given_up}"


@pytest.mark.slow
def test_a_change_that_was_given_up_is_made_once_or_not_at_all() -> None:
    ended = [Schedule(seed, HASTY, worst=0.6).run() for seed in range(examples(300))]
    assert ended.count(False) > len(ended) / 3, "a network as bad as this was to make most schedules give up"


def test_the_schedules_find_a_server_that_applies_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sessions, "begin", lambda *_: Outcome.RUNNING)
    with pytest.raises(Mismatch):
        run_all(range(50))


def test_the_schedules_find_a_server_that_forgets_what_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Sessions.begin

    def with_too_high_a_floor(sessions: Sessions, client: int, sequence: int, floor: int, *more: float) -> object:
        return begin(sessions, client, sequence, sequence, *more)

    monkeypatch.setattr(Sessions, "begin", with_too_high_a_floor)
    with pytest.raises(Mismatch):
        run_all(range(50))


def test_an_error_is_repeated_to_a_client_whose_first_reply_was_lost() -> None:
    network = Network(1, Faults(lose=0.4, repeat=0.4, delay=0.5))
    server = Server(max_table_bytes=1 << 14)
    client = Client([network.connect(server)], patience=PATIENT)
    client.attach(ROWS)
    for _ in range(20):
        # One message can reach the server several times; each of its answers must be the same error.
        with pytest.raises(TableError, match="table"):
            client.assign("rows", [1], np.ones((1, 2), np.float32))
    network.deliver_all()
    assert server.state.counters.num_errors > 20


def num_outcomes(server: Server) -> int:
    return sum(len(session.outcomes) for session in server.state.sessions._sessions.values())


def test_the_servers_memory_of_outcomes_stays_as_small_as_the_window() -> None:
    server = Server(max_table_bytes=1 << 14)
    client = Client([InProcess(server).connect()], window=4)
    client.create_table(ROWS)
    most = 0
    for _ in range(500):
        client.push("rows", [1], np.ones((1, ROWS.dim), np.float32))
        most = max(most, num_outcomes(server))
    client.flush()
    assert 1 <= most <= 4
    assert server.state.tables[ROWS.number].pull(KEYS[1:2])[0, 0] == -500


@pytest.mark.slow
def test_one_lost_reply_does_not_end_a_client_that_goes_on_pushing() -> None:
    """The change with the lost reply holds the floor down until it is sent again; meanwhile others are made."""
    network = Network(5, Faults(delay=0.0001))
    server = Server(max_table_bytes=1 << 14)
    client = Client([network.connect(server)], patience=Patience(timeout=30.0, retries=3), window=4)
    client.create_table(ROWS)
    handle = server.handle

    def lose_reply(*request: object) -> list:
        server.handle = handle
        handle(*request)
        return []

    server.handle = lose_reply
    most = 0
    for _ in range(MAX_AHEAD + 100):
        client.push("rows", [1], np.ones((1, ROWS.dim), np.float32))
        most = max(most, num_outcomes(server))
    client.flush()
    assert server.state.tables[ROWS.number].pull(KEYS[1:2])[0, 0] == -(MAX_AHEAD + 100)
    assert most < MAX_AHEAD


class TestDelayedDuplicates:
    """A copy of an old message arrives when much has happened since."""

    @pytest.fixture
    def talk(self, server: Server) -> Talk:
        talk = Talk(server)
        talk.create(ROWS)
        return talk

    @pytest.mark.parametrize("is_settled", [True, False], ids=["below the floor", "above the floor"])
    @pytest.mark.parametrize("old", ["push", "set", "erase"])
    def test_it_changes_nothing(self, talk: Talk, old: str, is_settled: bool) -> None:
        row = values_of(ROWS, [[8, 8]])
        arrays = {
            "push": (Command.PUSH, talk.message(Command.PUSH, *_push_of_one()).arrays),
            "set": (Command.SET, [keys_of(ROWS, [1]), row]),
            "erase": (Command.ERASE, [keys_of(ROWS, [1])]),
        }
        command, parts = arrays[old]
        message = talk.message(command, *parts, once=True)
        (reply,) = talk.send(message)
        assert_ok(reply)
        floor = {} if is_settled else {"floor": 1}
        assert_ok(talk.ask(Command.SET, keys_of(ROWS, [1]), values_of(ROWS, [[3, 3]]), once=True, **floor))
        assert_ok(talk.push(ROWS, [1], [[1, 1]], **floor))
        (again,) = talk.send(message)
        assert_ok(again)
        assert again.call == message.call
        assert talk.pull(ROWS, [1], flags=NO_CREATE).tolist() == [[2, 2]]

    def test_one_that_never_arrived_is_not_made_after_the_client_gave_it_up(self, talk: Talk) -> None:
        lost = talk.message(Command.PUSH, *_push_of_one(), once=True)
        assert_ok(talk.push(ROWS, [2], [[1, 1]]))  # its floor says: what came before is settled
        (late,) = talk.send(lost)
        assert_ok(late)
        assert talk.pull(ROWS, [1], flags=NO_CREATE).tolist() == [[0, 0]]

    def test_the_same_numbers_of_another_client_are_another_change(self, talk: Talk, server: Server) -> None:
        for client in (100, 101, 102):
            assert_ok(Talk(server, client=client).push(ROWS, [1], [[1, 1]]))
        assert talk.pull(ROWS, [1]).tolist() == [[-3, -3]]


def _push_of_one() -> list:
    return push_arrays(ROWS, [1], [[5, 5]])


def test_a_server_that_came_back_as_another_process_is_reported() -> None:
    network = Network(3, Faults())
    channel = network.connect(Server(max_table_bytes=1 << 14))
    client = Client([channel], names=["server 0 (somewhere)"], patience=PATIENT)
    client.create_table(ROWS)
    client.push("rows", [1], np.ones((1, ROWS.dim), np.float32)).result()
    channel.server = Server(max_table_bytes=1 << 14)
    for request in (client.ping, lambda: client.pull("rows", [1]).result(), client.ping):
        with pytest.raises(ServerRestarted, match=naming("server 0 (somewhere)")):
            request()


def test_a_reply_in_broken_bytes_is_asked_for_again() -> None:
    network = Network(4, Faults())
    server = Server(max_table_bytes=1 << 14)
    channel = network.connect(server)
    client = Client([channel], patience=PATIENT)
    replies = iter([[b"garbage"], [], [b"TFLT" + bytes(3)]])
    handle = server.handle

    def handle_badly(peer: object, frames: object, role: object) -> object:
        answer = handle(peer, frames, role)
        return [(peer, next(replies, None) or answer[0][1])]

    server.handle = handle_badly
    client.ping()
    assert client.num_retries >= 1


def test_encoding_leaves_the_message_as_it_was() -> None:
    """A repeat is encoded anew, so nothing of the first time may stick."""
    talk = Talk(Server())
    message = talk.message(Command.PUSH, *_push_of_one(), once=True)
    first, second = encode(message), encode(message)
    assert [bytes(memoryview(f)) for f in first] == [bytes(memoryview(f)) for f in second]
