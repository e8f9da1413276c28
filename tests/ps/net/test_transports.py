"""One battery for every transport and number of servers, held against plain numpy."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.fleets import WAIT, Fleet, SgdOracle, eighths, endpoints, in_process, in_threads
from support.messages import naming

from torchfleet.base.errors import PermissionRefused, TableError
from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

DIM, RATE, FIRST = 3, 0.5, 0.25
NAMES = (f"table {i}" for i in itertools.count())  # servers are shared by all tests, tables are not


ORDINARY = {("in process", 1), ("in process", 3), ("tcp", 1), ("tcp", 3), ("ipc", 2)}  # the others: make test-long
TRANSPORTS = [
    pytest.param(one, id=f"{one[0]} x{one[1]}", marks=() if one in ORDINARY else pytest.mark.long)
    for one in itertools.product(["in process", "tcp", "ipc"], [1, 2, 3])
]


@pytest.fixture(scope="module", params=TRANSPORTS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    transport, num_servers = request.param
    folder = tmp_path_factory.mktemp("s")
    way = (
        in_process(num_servers) if transport == "in process" else in_threads(endpoints(transport, num_servers, folder))
    )
    with way as made:
        yield made


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with fleet.client() as made:
        yield made


def new_table(client: Client, kind: str = "sparse", **fields: object) -> TableSpec:
    rule = Rule("sgd", lr=RATE)
    if kind == "dense":
        spec = TableSpec(next(NAMES), "dense", rule=rule, **fields)
    else:
        first = Initializer("constant", FIRST)
        spec = TableSpec(next(NAMES), kind, **{"dim": DIM, "rule": rule, "initializer": first, **fields})
    client.create_table(spec)
    return spec


def num_rows(client: Client, spec: TableSpec) -> int:
    return sum(server["tables"][spec.name]["rows"] for server in client.stats())


def random_keys(rng: np.random.Generator, num: int, num_ids: int = 200) -> np.ndarray:
    return rng.integers(0, num_ids, num).astype(np.uint64)


@pytest.mark.parametrize("kind", ["sparse", "array"])
def test_random_requests_have_the_results_of_plain_numpy(client: Client, kind: str) -> None:
    spec = new_table(client, kind, **({"size": 200} if kind == "array" else {}))
    oracle = SgdOracle(DIM, RATE, FIRST)
    rng = np.random.default_rng(len(spec.name))
    for _ in range(60):
        keys = random_keys(rng, rng.integers(0, 50))
        step = rng.choice(["pull", "push", "push at a rate", "assign", "erase"], p=[0.3, 0.4, 0.1, 0.1, 0.1])
        if step == "pull":
            assert np.array_equal(client.pull(spec.name, keys).result(), oracle.pull(keys))
        elif step.startswith("push"):
            grads, lr = eighths(rng, len(keys), DIM), (2.0 if "rate" in step else None)
            client.push(spec.name, keys, grads, lr)
            oracle.push(keys, grads, lr)
        elif step == "assign":
            values = eighths(rng, len(keys), DIM)
            client.assign(spec.name, keys, values)
            oracle.assign(keys, values)
        else:
            client.erase(spec.name, keys)
            oracle.erase(keys)
    client.flush()
    assert num_rows(client, spec) == oracle.num_rows
    everything = np.arange(200)
    assert np.array_equal(client.pull(spec.name, everything).result(), oracle.pull(everything))


def test_a_pull_without_creating_leaves_no_rows(client: Client) -> None:
    spec = new_table(client)
    client.push(spec.name, [1, 2], np.zeros((2, DIM), np.float32)).result()
    rows = client.pull(spec.name, [1, 2, 3, 4, 1], create=False).result()
    assert (rows == np.array([FIRST, FIRST, 0, 0, FIRST], np.float32)[:, None]).all()
    assert num_rows(client, spec) == 2


def test_what_was_pulled_can_be_written_to_whatever_its_size(client: Client) -> None:
    specs, block = [new_table(client, dim=1), new_table(client, dim=1)], new_table(client, "dense", size=3)
    for num in range(1, 20):
        pulled = client.pull_tables({spec.name: range(num) for spec in specs}).result()
        for spec in specs:
            pulled.rows[spec.name] += 1
    values = client.pull_dense(block.name).result()
    values += 1
    assert (client.pull(specs[0].name, range(20)).result() == FIRST).all()
    assert not client.pull_dense(block.name).result().any()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_dense_table_is_divided_and_put_together(client: Client, size: int) -> None:
    spec = new_table(client, "dense", size=size)
    rng = np.random.default_rng(size)
    oracle = eighths(rng, size)
    client.set_dense(spec.name, oracle)
    for lr in (None, 0.25, None):
        grads = eighths(rng, size)
        client.push_dense(spec.name, grads, lr)
        oracle = oracle - np.float32(RATE if lr is None else lr) * grads
    assert np.array_equal(client.pull_dense(spec.name).result(), oracle)
    client.set_dense(spec.name, np.zeros(size, np.float32))
    assert not client.pull_dense(spec.name).result().any()


def test_several_tables_in_one_push(client: Client) -> None:
    specs = [new_table(client), new_table(client), new_table(client, "dense", size=11)]
    rng = np.random.default_rng(1)
    keys = [random_keys(rng, 30), random_keys(rng, 5)]
    grads = [eighths(rng, 30, DIM), eighths(rng, 5, DIM), eighths(rng, 11)]
    oracles = [SgdOracle(DIM, RATE, FIRST), SgdOracle(DIM, RATE, FIRST)]
    for oracle, k, g, lr in zip(oracles, keys, grads, (None, 1.0), strict=False):
        oracle.push(k, g, lr)
    client.push_tables(
        {specs[0].name: (keys[0], grads[0]), specs[1].name: (keys[1], grads[1]), specs[2].name: grads[2]},
        {specs[1].name: 1.0},
    ).result()
    for spec, oracle, k in zip(specs, oracles, keys, strict=False):
        assert np.array_equal(client.pull(spec.name, k).result(), oracle.pull(k))
    assert np.array_equal(client.pull_dense(specs[2].name).result(), np.float32(-RATE) * grads[2])


def test_requests_without_keys(client: Client) -> None:
    spec = new_table(client)
    none = np.empty(0, np.uint64)
    assert client.pull(spec.name, none).result().shape == (0, DIM)
    client.push(spec.name, none, np.empty((0, DIM), np.float32)).result()
    client.assign(spec.name, none, np.empty((0, DIM), np.float32))
    client.erase(spec.name, none)
    assert num_rows(client, spec) == 0


def test_arrays_of_several_megabytes(client: Client) -> None:
    spec = new_table(client, dim=8)
    keys = np.arange(200_000, dtype=np.uint64)
    values = (np.arange(200_000 * 8, dtype=np.float32) % 1024).reshape(-1, 8)
    client.assign(spec.name, keys, values)
    client.push(spec.name, keys, values)
    found = client.pull(spec.name, keys[::-1]).result()
    assert np.array_equal(found, values[::-1] * np.float32(1 - RATE))
    block = new_table(client, "dense", size=2_000_000)
    content = np.arange(2_000_000, dtype=np.float32)
    client.set_dense(block.name, content)
    assert np.array_equal(client.pull_dense(block.name).result(), content)


def test_many_requests_in_flight_are_all_made(client: Client) -> None:
    spec = new_table(client)
    rng = np.random.default_rng(2)
    oracle = SgdOracle(DIM, RATE, FIRST)
    pulls = []
    for i in range(300):
        keys, grads = random_keys(rng, 20), eighths(rng, 20, DIM)
        client.push(spec.name, keys, grads)
        oracle.push(keys, grads)
        if i % 10 == 0:
            pulls.append((client.pull(spec.name, keys), oracle.pull(keys)))
    client.flush()
    for future, expected in pulls:  # one connection keeps the order of its requests
        assert np.array_equal(future.result(), expected)
    assert np.array_equal(client.pull(spec.name, range(200)).result(), oracle.pull(range(200)))


def test_changes_of_several_clients_at_once_all_count(fleet: Fleet, client: Client) -> None:
    spec, block = new_table(client), new_table(client, "dense", size=50)
    num_workers, num_pushes = 4, 50

    def work(worker: int) -> SgdOracle:
        rng = np.random.default_rng(worker)
        oracle = SgdOracle(DIM, RATE)
        with fleet.client(worker=worker + 1, role=Role.WORKER) as mine:
            mine.attach(spec)
            mine.attach(block)
            for _ in range(num_pushes):
                keys, grads = random_keys(rng, 20), eighths(rng, 20, DIM)
                mine.push_tables({spec.name: (keys, grads), block.name: np.ones(50, np.float32)})
                oracle.push(keys, grads)
            mine.flush()
        return oracle

    with ThreadPoolExecutor(num_workers) as pool:
        oracles = list(pool.map(work, range(num_workers), timeout=WAIT))
    expected = FIRST + sum(oracle.pull(range(200)) for oracle in oracles)
    assert np.array_equal(client.pull(spec.name, range(200)).result(), expected)
    assert (client.pull_dense(block.name).result() == -RATE * num_workers * num_pushes).all()


def test_an_error_of_the_server_arrives_as_its_class_and_the_service_goes_on(fleet: Fleet, client: Client) -> None:
    spec = new_table(client)
    client.attach(TableSpec("nowhere", dim=DIM))
    with pytest.raises(TableError, match=naming("server 0", "PULL")):
        client.pull("nowhere", range(100)).result()
    with pytest.raises(TableError, match=naming("CREATE_TABLE", f"'{spec.name}'", f"dim={DIM}", f"dim={DIM + 1}")):
        client.create_table(TableSpec(spec.name, dim=DIM + 1))
    with fleet.client(role=Role.WORKER) as worker:
        worker.attach(spec)
        with pytest.raises(PermissionRefused, match=naming("ERASE", "first_worker", "launcher", "worker")):
            worker.erase(spec.name, [1])
        with pytest.raises(PermissionRefused, match=naming("STOP", "launcher")):
            worker.stop_servers()
    assert (client.pull(spec.name, [1]).result() == FIRST).all()


def test_stats_come_from_every_server(fleet: Fleet, client: Client) -> None:
    spec = new_table(client)
    client.pull(spec.name, range(1000)).result()
    stats = client.stats()
    assert len(stats) == fleet.num_servers
    rows = [server["tables"][spec.name]["rows"] for server in stats]
    assert sum(rows) == 1000
    assert min(rows) > 1000 / fleet.num_servers / 2, "keys are to be spread evenly"
    assert all(server["requests"] >= 2 and server["uptime"] > 0 for server in stats)


def test_workers_meet_at_a_barrier(fleet: Fleet) -> None:
    arrived = []

    def work(worker: int) -> None:
        with fleet.client(worker=worker, role=Role.WORKER) as mine:
            time.sleep(0.1 * worker)
            arrived.append(worker)
            mine.barrier("all", 3, timeout=WAIT)
            assert len(arrived) == 3

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3), timeout=WAIT))


def test_a_slow_barrier_does_not_keep_others_from_being_served(fleet: Fleet, client: Client) -> None:
    spec = new_table(client)
    waiter = threading.Thread(target=lambda: fleet.client(worker=0).barrier("slow", 2, timeout=WAIT), daemon=True)
    waiter.start()
    time.sleep(0.1)
    for _ in range(50):
        client.pull(spec.name, [1, 2, 3]).result()
    assert waiter.is_alive(), "they were served after the barrier, not beside it"
    with fleet.client(worker=1) as other:
        other.barrier("slow", 2, timeout=WAIT)
    waiter.join(WAIT)
    assert not waiter.is_alive()


def test_a_client_that_goes_away_in_the_middle_disturbs_nobody(fleet: Fleet, client: Client) -> None:
    spec = new_table(client)
    for _ in range(5):
        hasty = fleet.client(worker=1)
        hasty.attach(spec)
        for _ in range(8):
            hasty.pull(spec.name, range(1000))
        hasty.close()
    assert (client.pull(spec.name, range(1000)).result() == FIRST).all()
