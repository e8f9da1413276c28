"""A worker's view of the servers: what it refuses before anything is sent, how errors come back, servers that die."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from support.cases import each_of
from support.fleets import WAIT, Fleet, ForkedServer, in_process, in_processes
from support.messages import naming
from support.scripts.launching import wait_until

from torchfleet.base.errors import FleetError, ServerRestarted, ServerUnreachable, TableError
from torchfleet.launch.roles import free_ports
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

SGD = Rule("sgd", lr=1.0)
ROWS = TableSpec("rows", dim=2, rule=SGD, initializer=Initializer("constant", 1.0))
ARRAY = TableSpec("array", "array", size=100, dim=1, rule=SGD)
DENSE = TableSpec("dense", "dense", size=10, rule=SGD)
KEYS = np.arange(40)
SHORT = Patience(timeout=1.5, retries=2)
NAN = float("nan")


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with in_process(request.param) as made:
        yield made


@pytest.fixture
def client(fleet: Fleet) -> Client:
    made = fleet.client()
    for spec in (ROWS, ARRAY, DENSE):
        made.create_table(spec)
    return made


def with_one(value: float, *shape: int) -> np.ndarray:
    """Ones, and somewhere in the middle another value."""
    values = ones(*shape)
    values.reshape(-1)[values.size // 2] = value
    return values


REFUSED: dict[str, tuple[Callable[[Client], object], str]] = {
    "an unknown table": (lambda c: c.pull("rwos", [1]), "'rwos' 'array' 'dense' 'rows'"),
    "an unknown table in a push": (lambda c: c.push("rwos", [1], ones(1, 2)), "'array' 'dense' 'rows'"),
    "an unknown dense table": (lambda c: c.pull_dense("rwos"), "'array' 'dense' 'rows'"),
    "an unknown table to set": (lambda c: c.set_dense("rwos", ones(10)), "'array' 'dense' 'rows'"),
    "an unknown table to erase": (lambda c: c.erase("rwos", [1]), "'array' 'dense' 'rows'"),
    "keys that are no integers": (lambda c: c.pull("rows", [1.5]), "keys"),
    "keys that are truth values": (lambda c: c.pull("rows", [True]), "keys"),
    "NaN in a push": (lambda c: c.push("rows", KEYS, with_one(NAN, 40, 2)), "NaN"),
    "infinity in a push": (lambda c: c.push("rows", KEYS, with_one(np.inf, 40, 2)), "NaN"),
    "NaN in the second table of a push": (
        lambda c: c.push_tables({"rows": (KEYS, ones(40, 2)), "dense": with_one(NAN, 10)}),
        "NaN",
    ),
    "NaN in a dense push": (lambda c: c.push_dense("dense", with_one(NAN, 10)), "NaN"),
    "NaN to set": (lambda c: c.set_dense("dense", with_one(NAN, 10)), "NaN"),
    "NaN to assign": (lambda c: c.assign("rows", KEYS, 3 * with_one(NAN, 40, 2)), "NaN"),
    "rows too narrow": (lambda c: c.push("rows", KEYS, ones(40, 1)), "(40, 2) (40, 1)"),
    "rows too few": (lambda c: c.push("rows", KEYS, ones(39, 2)), "(40, 2) (39, 2)"),
    "rows too many": (lambda c: c.push("rows", KEYS, ones(41, 2)), "(40, 2) (41, 2)"),
    "too few rows to assign": (lambda c: c.assign("rows", KEYS, 3 * ones(39, 2)), "40"),
    "too narrow rows to assign": (lambda c: c.assign("rows", KEYS, 3 * ones(40, 1)), "2"),
    "a dense block too short": (lambda c: c.push_dense("dense", ones(9)), "10 9"),
    "a dense block too long": (lambda c: c.set_dense("dense", ones(11)), "10 11"),
    "rows of a dense table": (lambda c: c.pull("dense", [0, 3]).result(), "dense"),
    "the whole of a sparse table": (lambda c: c.pull_dense("rows").result(), "dense"),
    "the whole of an array table": (lambda c: c.pull_dense("array").result(), "dense"),
    "keys for a dense table": (lambda c: c.push("dense", np.arange(10), ones(10, 1)).result(), "dense"),
    "a block for a sparse table": (lambda c: c.push_dense("rows", ones(2)).result(), "rows"),
    "a negative rate": (lambda c: c.push("rows", KEYS, ones(40, 2), lr=-1.0).result(), "rate"),
    "a rate that is no number": (lambda c: c.push("rows", KEYS, ones(40, 2), lr=NAN).result(), "rate"),
}


class TestRefused:
    @each_of(("ask", "text"), REFUSED.values(), ids=REFUSED.keys())
    def test_it_is_refused_with_a_reason_and_changes_no_server(
        self, client: Client, fleet: Fleet, ask: Callable[[Client], object], text: str
    ) -> None:
        client.pull("rows", KEYS).result()
        before = contents(fleet)
        with pytest.raises(TableError, match=naming(*text.split())):
            ask(client)
        client.ping()
        assert contents(fleet) == before

    @each_of("name", [name for name in REFUSED if "NaN" in name or "infinity" in name])
    def test_what_is_not_finite_is_not_even_sent(self, client: Client, fleet: Fleet, name: str) -> None:
        before = [server.state.counters.num_requests for server in fleet.servers]
        with pytest.raises(TableError):
            REFUSED[name][0](client)
        assert [server.state.counters.num_requests for server in fleet.servers] == before

    def test_a_client_without_servers_is_refused(self) -> None:
        with pytest.raises(FleetError, match="server"):
            Client([])

    @each_of("endpoint", ["", "localhost:7000", "tcp://", "tcp://127.0.0.1", "http://127.0.0.1:80"])
    def test_an_address_that_is_none_is_named(self, endpoint: str) -> None:
        with pytest.raises(FleetError, match=naming(f"'{endpoint}'")):
            Client.connect([endpoint])

    def test_replies_of_another_shape_are_not_believed(self, fleet: Fleet, client: Client) -> None:
        """They are copied to where the keys stood: one row too many would be written behind the result."""
        for server in fleet.servers:
            table = server.state.tables[ROWS.number]
            table.pull = lambda keys, create: ones(max(0, len(keys) - 1), 2)
        with pytest.raises(FleetError):
            client.pull("rows", KEYS).result()


def contents(fleet: Fleet) -> list:
    keys = np.arange(100, dtype=np.uint64)
    return [
        {
            table.spec.name: (
                table.stats()["rows"],
                table.step,
                (table.get(0, table.size) if table.spec.kind == "dense" else _held(table, keys)).tolist(),
            )
            for table in server.state.tables.values()
        }
        for server in fleet.servers
    ]


def _held(table: object, keys: np.ndarray) -> np.ndarray:
    spec = table.spec
    mine = keys[keys % spec.num_shards == spec.shard] if spec.kind == "array" else keys
    return table.pull(mine, create=False)


class TestRequests:
    def test_rows_come_in_the_order_of_their_keys(self, client: Client) -> None:
        values = np.stack([KEYS, -KEYS], axis=1).astype(np.float32)
        client.assign("rows", KEYS, values)
        order = np.random.default_rng(0).integers(0, 40, 500)
        assert np.array_equal(client.pull("rows", order).result(), values[order])

    @pytest.mark.parametrize(
        "keys",
        [[3, 5], (3, 5), np.array([3, 5], np.int32), np.array([3, 5], np.uint8), np.array([[3], [5]]), range(3, 7, 2)],
        ids=["list", "tuple", "int32", "uint8", "two dimensions", "range"],
    )
    def test_keys_are_integers_of_any_kind(self, client: Client, keys: object) -> None:
        client.assign("rows", [3, 5], np.array([[1, 2], [3, 4]], np.float32))
        assert client.pull("rows", keys).result().tolist() == [[1, 2], [3, 4]]

    def test_negative_and_huge_keys_are_keys_like_others(self, client: Client) -> None:
        keys = np.array([-1, -(2**63), 2**63 - 1, 0])
        client.push("rows", keys, np.arange(8, dtype=np.float32).reshape(4, 2)).result()
        assert client.pull("rows", keys[::-1]).result().tolist() == [[-5, -6], [-3, -4], [-1, -2], [1, 0]]
        assert client.pull("rows", np.array([2**64 - 1], np.uint64)).result().tolist() == [[1, 0]]

    @pytest.mark.parametrize("grads", [np.empty((0, 1), np.float32), np.empty(0, np.float32)], ids=["(0, 1)", "(0,)"])
    def test_an_empty_push_is_a_push(self, client: Client, grads: np.ndarray) -> None:
        client.push("array", [], grads).result()

    def test_a_flat_block_is_one_column(self, client: Client) -> None:
        client.push("array", [1, 2], np.array([3, 4], np.float32)).result()
        assert client.pull("array", [1, 2]).result().tolist() == [[-3], [-4]]

    def test_several_tables_travel_together(self, client: Client, fleet: Fleet) -> None:
        before = [server.state.counters.num_requests for server in fleet.servers]
        client.push_tables({"rows": (KEYS, ones(40, 2)), "dense": ones(10), "array": (KEYS, ones(40, 1))}).result()
        after = [server.state.counters.num_requests for server in fleet.servers]
        assert [b - a for a, b in zip(before, after, strict=True)] == [1] * fleet.num_servers
        assert (client.pull("rows", KEYS).result() == 0).all()
        assert (client.pull("array", KEYS).result() == -1).all()
        assert (client.pull_dense("dense").result() == -1).all()

    def test_a_table_that_another_client_made_can_be_attached(self, fleet: Fleet, client: Client) -> None:
        other = fleet.client(worker=1)
        other.attach(ROWS)
        other.push("rows", [1], ones(1, 2)).result()
        assert client.pull("rows", [1]).result().tolist() == [[0, 0]]

    def test_a_result_can_be_asked_for_again(self, client: Client) -> None:
        future = client.pull("rows", [1])
        assert future.result().tolist() == future.result().tolist() == [[1, 1]]
        assert future.is_done

    def test_what_was_pulled_belongs_to_the_caller(self, client: Client) -> None:
        rows, block = client.pull("rows", [1]).result(), client.pull_dense("dense").result()
        rows += 5
        block += 5
        assert client.pull("rows", [1]).result().tolist() == [[1, 1]]
        assert (client.pull_dense("dense").result() == 0).all()


class TestErrorsOfPushes:
    """The table is known to the client only, so the servers refuse what it pushes."""

    @pytest.fixture
    def lost(self, client: Client) -> Client:
        client.attach(TableSpec("lost", dim=1))
        return client

    def test_flush_raises_what_nobody_waited_for(self, lost: Client) -> None:
        lost.push("lost", KEYS, ones(40, 1))
        with pytest.raises(TableError, match=naming("server 0", "PUSH", "'rows'")):
            lost.flush()
        lost.flush()

    def test_the_next_push_raises_it_and_is_not_made(self, lost: Client) -> None:
        lost.push("lost", KEYS, ones(40, 1))
        lost.ping()
        with pytest.raises(TableError, match=naming("'rows'")):
            lost.push("rows", KEYS, ones(40, 2))
        lost.flush()
        assert (lost.pull("rows", KEYS).result() == 1).all()
        lost.push("rows", KEYS, ones(40, 2)).result()

    def test_it_is_raised_once(self, lost: Client) -> None:
        future = lost.push("lost", KEYS, ones(40, 1))
        with pytest.raises(TableError):
            future.result()
        lost.push("rows", KEYS, ones(40, 2))
        lost.flush()

    def test_each_of_several_is_raised(self, lost: Client) -> None:
        for _ in range(3):
            lost.push("lost", KEYS, ones(40, 1))
            with pytest.raises(TableError):
                lost.flush()
        lost.flush()

    def test_leaving_raises_it_too(self, lost: Client) -> None:
        lost.push("lost", KEYS, ones(40, 1))
        with pytest.raises(TableError):
            lost.leave()


class TestDeadServers:
    """Real processes, really killed; real time."""

    def test_an_address_nobody_listens_on_is_named_within_the_time_out(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            with Client.connect([endpoint], patience=SHORT) as client:
                started = time.monotonic()
                with pytest.raises(ServerUnreachable, match=naming("server 0", endpoint, "PING")):
                    client.ping()
                assert 1.4 < time.monotonic() - started < WAIT

    @pytest.mark.slow
    def test_a_server_that_accepts_and_says_nothing_is_named_within_the_time_out(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
            with Client.connect([endpoint], patience=SHORT) as client:
                started = time.monotonic()
                for _ in range(2):
                    with pytest.raises(ServerUnreachable, match=endpoint):
                        client.ping()
                assert time.monotonic() - started < WAIT

    @pytest.mark.slow
    def test_a_killed_server_is_named_within_the_time_out_and_the_others_serve_on(self) -> None:
        with in_processes(2) as fleet:
            client, alive = fleet.client(patience=Patience(8.0, 2)), fleet.servers[0]
            client.create_table(ROWS)
            dead = fleet.servers[1]

            def push_on() -> None:
                deadline, num_pushes = time.monotonic() + WAIT, 0
                while time.monotonic() < deadline:
                    client.push("rows", KEYS, ones(40, 2))
                    num_pushes += 1
                    if num_pushes == 10:
                        dead.kill()

            with pytest.raises(ServerUnreachable) as caught:
                push_on()
            assert f"server 1 ({dead.endpoint})" in str(caught.value)
            with closing(Client.connect([alive.endpoint], patience=Patience(WAIT, 1))) as other:
                other.ping()

    @pytest.mark.slow
    def test_a_server_that_hangs_and_comes_back_in_time_is_waited_for(self) -> None:
        with in_processes(1) as fleet:
            client = fleet.client(patience=Patience(30.0, 4))
            client.create_table(ROWS)
            process = fleet.servers[0]

            def wake_after_retry() -> None:
                wait_until(lambda: client.num_retries > 0, WAIT, "retry")
                process._process.send_signal(signal.SIGCONT)

            process._process.send_signal(signal.SIGSTOP)
            try:
                futures = [client.push("rows", [1], ones(1, 2)) for _ in range(5)]
                waker = threading.Thread(target=wake_after_retry)
                waker.start()
                for future in futures:
                    future.result()
                waker.join(WAIT)
            finally:
                process._process.send_signal(signal.SIGCONT)
            assert client.num_retries > 0
            assert client.pull("rows", [1]).result().tolist() == [[-4, -4]]

    @pytest.mark.slow
    def test_a_server_that_came_back_empty_is_reported_as_restarted(self) -> None:
        place = f"tcp://127.0.0.1:{free_ports(1)[0]}"  # claimed: no other process gets it between the two
        with ForkedServer(place) as first, closing(Client.connect([place], patience=Patience(30.0, 4))) as client:
            client.create_table(ROWS)
            client.push("rows", [1], ones(1, 2)).result()
            first.kill()
            with ForkedServer(place) as second:
                assert second.endpoint == first.endpoint
                with pytest.raises(ServerRestarted, match=naming("server 0", first.endpoint)):
                    client.pull("rows", [1]).result()


def test_what_is_kept_for_sets_of_tables_is_bounded() -> None:
    """A model may look up other tables in every call."""
    with in_process(1) as made:
        client, specs = made.client(), [TableSpec(f"t{i}", dim=2, rule=SGD) for i in range(12)]
        for spec in specs:
            client.create_table(spec)
        for number in range(1, 400):
            asked = [spec.name for i, spec in enumerate(specs) if number >> i & 1]
            asked += [spec.name for spec in specs if spec.name not in asked][:9]
            client.pull_tables(dict.fromkeys(asked, KEYS)).result()
        assert len(client._joined) <= 64
