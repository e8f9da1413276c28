"""Servers save their tables between requests: all of it, exactly, for any number of servers, beside training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import WAIT, Fleet, Talk, assert_ok, in_process, in_processes, in_threads, refusal
from support.lossy import Faults, Network
from support.messages import naming
from support.scripts.saved_models import contents, load, rows_on_disk, save, whole_layout
from support.searches import examples

from torchfleet.base.errors import CheckpointError, FleetError, PermissionRefused, WireError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest, Saved, described, read_manifest, write_manifest
from torchfleet.ps.checkpoint.part_reader import read_part
from torchfleet.ps.net.transport import InProcess
from torchfleet.ps.net.wire import Command, Message, Role, decode_reply, encode, pack, unpack
from torchfleet.ps.server.saves import table_saving
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

RULES = {
    "sgd": Rule("sgd", lr=0.5),
    "adagrad": Rule("adagrad", lr=0.5, initial_accumulator=0.25),
    "adam": Rule("adam", lr=0.125),
}
SGD = RULES["sgd"]
FIRST = Initializer("uniform", -1.0, 1.0)


def specs_of(rule: Rule) -> list[TableSpec]:
    return [
        TableSpec("rows", dim=3, rule=rule, initializer=FIRST),
        TableSpec("array", "array", dim=2, size=101, rule=rule, initializer=FIRST),
        TableSpec("dense", "dense", size=29, rule=rule),
    ]


def train(client: Client, seed: int, num_steps: int = 4) -> None:
    """Some steps on all three tables, with keys from the whole range; then some rows are dropped."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**64, 300, np.uint64)
    keys[:4] = [0, 1, 2**63, 2**64 - 1]
    for _ in range(num_steps):
        some, ids = rng.choice(keys, 200), rng.integers(0, 101, 40)
        client.push_tables(
            {
                "rows": (some, rng.normal(size=(200, 3)).astype(np.float32)),
                "array": (ids, rng.normal(size=(40, 2)).astype(np.float32)),
                "dense": rng.normal(size=29).astype(np.float32),
            }
        ).result()
    client.erase("rows", keys[10:60])
    client.erase("array", np.arange(0, 101, 7))


def oracle(rule: Rule, seed: int) -> Any:
    """One server without any others, and never saved."""
    with in_process(1) as fleet:
        client = fleet.client()
        for spec in specs_of(rule):
            client.create_table(spec)
        train(client, seed)
        return contents(fleet.servers)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are made by hand, without the folder that worker 0 makes before."""
    monkeypatch.setenv("FLEET_SAVE_ROOTS", "/,memory://")


@pytest.fixture
def dirname(tmp_path: Path) -> str:
    return str(tmp_path / "model")


@pytest.mark.parametrize("num_saving", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_everything_comes_back_on_any_number_of_servers(rule: str, num_saving: int, dirname: str) -> None:
    specs = specs_of(RULES[rule])
    with in_process(num_saving) as fleet:
        client = fleet.client()
        for spec in specs:
            client.create_table(spec)
        train(client, seed=num_saving)
        before = contents(fleet.servers)
        manifest = save(client, specs, dirname)
        assert contents(fleet.servers) == before
        steps = {table.spec.name: table.step for table in fleet.servers[0].state.tables.values()}
    assert before == oracle(RULES[rule], seed=num_saving)
    assert {table.name: table.rows for table in manifest.tables} == {name: len(rows) for name, rows in before.items()}
    for num_loading in (1, 2, 3, 4):
        servers = load(num_loading, specs, dirname)
        assert contents(servers) == before
        for server in servers:
            assert {table.spec.name: table.step for table in server.state.tables.values()} == steps
        client = Client([InProcess(server).connect() for server in servers])
        client.attach(specs[0])
        keys = np.array(sorted(before["rows"]), np.uint64)
        expected = np.stack([np.frombuffer(before["rows"][int(key)], np.float32)[:3] for key in keys])
        assert np.array_equal(client.pull("rows", keys, create=False).result(), expected)


def test_training_goes_on_from_a_saved_model_as_if_nothing_had_been(dirname: str) -> None:
    for rule in RULES.values():
        specs = specs_of(rule)
        with in_process(2) as fleet:
            client = fleet.client()
            for spec in specs:
                client.create_table(spec)
            train(client, seed=1)
            save(client, specs, dirname)
            train(client, seed=2)
            expected = contents(fleet.servers)
        servers = load(3, specs, dirname)
        client = Client([InProcess(server).connect() for server in servers])
        for spec in specs:
            client.attach(spec)
        train(client, seed=2)
        assert contents(servers) == expected


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("with_state", [True, False])
def test_empty_tables_are_saved_and_loaded(num_servers: int, with_state: bool, dirname: str) -> None:
    specs = specs_of(RULES["adam"])
    with in_process(num_servers) as fleet:
        client = fleet.client()
        for spec in specs:
            client.create_table(spec)
        before = contents(fleet.servers)
        save(client, specs, dirname, with_state)
    assert contents(load(2, specs, dirname)) == before


def test_one_row_on_four_servers_is_saved(dirname: str) -> None:
    """Three of them have nothing to save."""
    spec = TableSpec("rows", dim=3, rule=SGD)
    with in_process(4) as fleet:
        client = fleet.client()
        client.create_table(spec)
        client.pull("rows", [7]).result()
        save(client, [spec], dirname)
        assert contents(load(1, [spec], dirname)) == contents(fleet.servers)


def test_no_tables_at_all_are_saved(dirname: str) -> None:
    with in_process(2) as fleet:
        assert save(fleet.client(), [], dirname).parts == []
    assert contents(load(1, [], dirname)) == {}


def test_a_block_with_fewer_elements_than_servers_is_saved(dirname: str) -> None:
    spec = TableSpec("dense", "dense", size=2, rule=RULES["adam"])
    with in_process(4) as fleet:
        client = fleet.client()
        client.create_table(spec)
        client.push_dense("dense", np.array([1, -2], np.float32)).result()
        save(client, [spec], dirname)
        for num in (1, 2, 3, 4):
            assert contents(load(num, [spec], dirname)) == contents(fleet.servers)


@pytest.mark.parametrize("rows_per_file", [1, 7, 64, 1000])
def test_rows_are_cut_into_files_and_none_is_lost(
    rows_per_file: int, dirname: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TableSpec("rows", dim=2, rule=SGD, initializer=FIRST)
    monkeypatch.setattr(table_saving, "SLICE", min(rows_per_file, 50))
    monkeypatch.setattr(table_saving, "PART_BYTES", rows_per_file * 16)
    with in_process(2) as fleet:
        client = fleet.client()
        client.create_table(spec)
        client.pull("rows", np.arange(130)).result()
        manifest = save(client, [spec], dirname)
        assert sum(part.rows for part in manifest.parts) == 130
        assert len({part.file for part in manifest.parts}) == len(manifest.parts) >= 130 // (rows_per_file + 50)
        assert contents(load(3, [spec], dirname)) == contents(fleet.servers)


NAMES = ["a/b", "a_b", "../../up", "ä", "a b", "x" * 200, ".", "con", "a\nb", "'; rm"]


def test_tables_of_any_name_are_kept_apart_and_in_their_folder(tmp_path: Path) -> None:
    specs = [TableSpec(name, dim=1, rule=SGD) for name in NAMES]
    with in_process(2) as fleet:
        client = fleet.client()
        for i, spec in enumerate(specs):
            client.create_table(spec)
            client.assign(spec.name, [1, 2, 3], np.full((3, 1), i, np.float32))
        manifest = save(client, specs, str(tmp_path / "model"))
        assert contents(load(1, specs, str(tmp_path / "model"))) == contents(fleet.servers)
    assert os.listdir(tmp_path) == ["model"]
    assert sorted(os.listdir(tmp_path / "model")) == ["manifest.json", manifest.save]
    assert sorted(os.listdir(tmp_path / "model" / manifest.save)) == sorted(part.file for part in manifest.parts)


def test_a_second_save_takes_the_place_of_the_first(dirname: str) -> None:
    spec = TableSpec("rows", dim=1, rule=SGD)
    with in_process(2) as fleet:
        client = fleet.client()
        client.create_table(spec)
        for i in range(3):
            client.assign("rows", np.arange(10), np.full((10, 1), i, np.float32))
            manifest = save(client, [spec], dirname)
            assert contents(load(1, [spec], dirname)) == contents(fleet.servers)
            assert sorted(os.listdir(dirname)) == ["manifest.json", manifest.save]


def test_a_save_for_prediction_holds_values_only(dirname: str) -> None:
    specs = specs_of(RULES["adam"])
    with in_process(2) as fleet:
        client = fleet.client()
        for spec in specs:
            client.create_table(spec)
        train(client, seed=1)
        full = save(client, specs, dirname)
        values = {key: row[:3] for key, row in rows_on_disk(dirname, "rows")}
        small = save(client, specs, dirname, with_state=False)
    assert {key: row.tolist() for key, row in rows_on_disk(dirname, "rows")} == {
        key: row.tolist() for key, row in values.items()
    }
    assert all(row.shape == (3,) for _, row in rows_on_disk(dirname, "rows"))
    assert sum(part.bytes for part in small.parts) < 0.6 * sum(part.bytes for part in full.parts)
    assert {table.num_states for table in small.tables} == {0}


def test_memory_folders_work_like_others(tmp_path: Path) -> None:
    specs = specs_of(RULES["adagrad"])
    with in_process(2) as fleet:
        client = fleet.client()
        for spec in specs:
            client.create_table(spec)
        train(client, seed=1)
        for _ in range(2):
            manifest = save(client, specs, f"memory://{tmp_path.name}/model")
        assert contents(load(3, specs, f"memory://{tmp_path.name}/model")) == contents(fleet.servers)
        assert list(Storage(f"memory://{tmp_path.name}/model").folders()) == [manifest.save]


# Damage, at the level of a load


def damaged_in(dirname: str, how: Callable[[Path], None]) -> str:
    """Save a model, damage one file; returns its name."""
    specs = specs_of(RULES["adam"])
    with in_process(2) as fleet:
        client = fleet.client()
        for spec in specs:
            client.create_table(spec)
        train(client, seed=1)
        manifest = save(client, specs, dirname)
    path = Path(dirname, manifest.save, manifest.parts_of("rows")[-1].file)
    how(path)
    return path.name


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "how",
    [
        Path.unlink,
        _flip,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
    ],
    ids=["missing", "a bit", "cut", "empty"],
)
def test_a_damaged_file_is_named_by_whoever_loads_it(dirname: str, how: Callable[[Path], None]) -> None:
    name = damaged_in(dirname, how)
    for num_servers in (1, 2, 3):
        with pytest.raises(CheckpointError, match=naming(name)):
            load(num_servers, specs_of(RULES["adam"]), dirname)


# Beside training, step by step: the test is the loop that does a slice of the save between two requests


class Slow:
    """A server whose save advances when the test says so."""

    def __init__(self, spec: TableSpec, dirname: str) -> None:
        self.server, self.spec, self._dirname = Server(1 << 26), spec, dirname
        self.talk = Talk(self.server)
        self.talk.create(spec)

    @property
    def table(self) -> Any:
        return self.server.state.tables[self.spec.number]

    def begin(self, token: int = 1, folder: str = "save-1", dirname: str | None = None) -> Message:
        """The request to save, sent; there is no reply yet."""
        message = save_message(self.talk, dirname or self._dirname, folder, token)
        assert self.talk.send(message) == []
        return message

    def slice(self) -> bool:
        """Whether there is more to do."""
        return self.server.work() is not None

    def first_slice(self) -> None:
        """Waits while a thread opens the folder."""
        deadline = time.monotonic() + WAIT
        while not self.server.work():
            assert time.monotonic() < deadline, "the save does not begin"
            time.sleep(0.001)

    def finish(self) -> list[tuple[Any, Any]]:
        """All replies, once no job is left."""
        deadline, replies = time.monotonic() + WAIT, []
        while (worked := self.server.work()) is not None:
            assert time.monotonic() < deadline, "the save does not end"
            time.sleep(0 if worked else 0.001)
            replies += self.server.tick(time.monotonic())
        return [*replies, *self.server.tick(time.monotonic())]

    def write_manifest(self, saved: Saved) -> None:
        table = described(self.spec, self.table.num_words > self.spec.dim, 0, 0, whole_layout(self.spec))
        write_manifest(
            Storage(self._dirname), Manifest("save-1", 1, "full", 1, [table], saved.parts, num_files=len(saved.parts))
        )


def save_message(talk: Talk, dirname: str, folder: str = "save-1", token: int = 1, **fields: Any) -> Message:
    body = {"dirname": dirname, "folder": folder, "with_state": True, "token": token, **fields}
    return talk.message(Command.SAVE, pack(body))


def saved_of(replies: list[tuple[Any, Any]]) -> Saved:
    (reply,) = [decode_reply(frames) for _, frames in replies]
    assert_ok(reply)
    return unpack(reply.arrays[0], Saved)


def constant_pushes(num: int, lr: float, dim: int) -> dict[float, list[float]]:
    """Adagrad under gradients of 1 in plain float32: the state after every number of pushes, and its value."""
    state, value, known = np.float32(0), np.float32(0), {0.0: [0.0] * dim}
    for _ in range(num):
        state = np.float32(state + np.float32(1))
        value = np.float32(value - np.float32(lr) * (np.float32(1) / (np.sqrt(state) + np.float32(1e-10))))
        known[float(state)] = [float(value)] * dim
    return known


def test_value_and_state_of_a_row_belong_together_while_others_push(
    dirname: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_saving, "SLICE", 50)
    slow = Slow(TableSpec("rows", dim=2, rule=Rule("adagrad", lr=0.5)), dirname)
    keys = np.arange(1000)
    slow.talk.push(slow.spec, keys, np.ones((1000, 2)))
    slow.begin()
    slow.first_slice()
    num_pushes = 1
    while num_pushes < 15 and slow.slice():
        assert_ok(slow.talk.push(slow.spec, keys, np.ones((1000, 2))))
        num_pushes += 1
    slow.write_manifest(saved_of(slow.finish()))
    known = constant_pushes(num_pushes, 0.5, 2)
    rows = rows_on_disk(dirname, "rows")
    assert sorted(key for key, _ in rows) == keys.tolist()
    for _, row in rows:
        assert row[2] == row[3]
        assert row[:2].tolist() == known[float(row[2])]
    assert len({float(row[2]) for _, row in rows}) > 10  # pushes did go on meanwhile


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["erase", "add", "slice"]), st.lists(st.integers(0, 120), min_size=1, max_size=30)),
        max_size=20,
    )
)
@settings(max_examples=examples(20))
def test_a_row_that_lives_throughout_is_saved_once(moves: list[tuple[str, list[int]]]) -> None:
    """While rows come and go around it, and are reused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_saving, "SLICE", 8)
        dirname = "memory://coming-and-going"
        slow = Slow(TableSpec("rows", dim=1, rule=Rule("adagrad", lr=0.5)), dirname)
        slow.talk.push(slow.spec, np.arange(60), np.ones((60, 1)))
        slow.begin()
        steady, ever = set(range(60)), set(range(60))
        for move, keys in moves:
            if move == "slice":
                slow.slice()
            elif move == "erase":
                slow.table.erase(np.array(keys, np.uint64))
                steady -= set(keys)
            else:
                slow.talk.push(slow.spec, keys, np.ones((len(keys), 1)))
                ever |= set(keys)
        slow.write_manifest(saved_of(slow.finish()))
        found = [key for key, _ in rows_on_disk(dirname, "rows")]
    assert [key for key in found if key in steady] == sorted(steady, key=found.index)
    assert {key: found.count(key) for key in steady} == dict.fromkeys(steady, 1)
    assert set(found) <= ever


def test_rows_are_saved_once_while_the_map_grows(dirname: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_saving, "SLICE", 1024)
    slow = Slow(TableSpec("rows", dim=1, rule=SGD), dirname)
    rng = np.random.default_rng(0)
    steady = rng.choice(1 << 40, 30_000, replace=False).astype(np.uint64)
    for start in range(0, 30_000, 2000):
        slow.talk.pull(slow.spec, steady[start : start + 2000])
    slow.begin()
    fresh = np.arange(1 << 41, (1 << 41) + 60_000, dtype=np.uint64)
    start = 0
    while start < 60_000 and slow.slice():
        slow.talk.pull(slow.spec, fresh[start : start + 2000])
        slow.table.erase(fresh[start : start + 500])
        start += 2000
    slow.write_manifest(saved_of(slow.finish()))
    found = np.array([key for key, _ in rows_on_disk(dirname, "rows")], np.uint64)
    assert start > 40_000
    assert np.array_equal(np.sort(found[np.isin(found, steady)]), np.sort(steady))


def test_a_disk_that_hangs_holds_up_nobody(dirname: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released, write = threading.Event(), Storage.write

    def hang(self: Storage, name: str, buffers: Any) -> None:
        assert released.wait(WAIT)
        write(self, name, buffers)

    monkeypatch.setattr(Storage, "write", hang)
    monkeypatch.setattr(table_saving, "SLICE", 10)
    monkeypatch.setattr(table_saving, "PART_BYTES", 100)
    slow = Slow(TableSpec("rows", dim=1, rule=SGD), dirname)
    slow.talk.pull(slow.spec, np.arange(500))
    num_threads = threading.active_count()
    slow.begin()
    started = time.monotonic()
    for _ in range(200):
        assert slow.slice()
        slow.talk.push(slow.spec, np.arange(500), np.ones((500, 1)))
    assert time.monotonic() - started < WAIT / 2
    assert threading.active_count() < num_threads + 10
    released.set()
    assert sum(part.rows for part in saved_of(slow.finish()).parts) == 500


# Requests to save: repeats, several, wrong ones


def test_a_repeat_gets_the_same_answer_and_saves_nothing_again(dirname: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], Storage.write
    monkeypatch.setattr(Storage, "write", lambda self, name, data: (written.append(name), write(self, name, data))[1])
    slow = Slow(TableSpec("rows", dim=1, rule=SGD), dirname)
    slow.talk.pull(slow.spec, np.arange(50))
    message = slow.begin()
    assert slow.talk.send(message) == []
    first = saved_of(slow.finish())
    slow.talk.pull(slow.spec, np.arange(100))
    for _ in range(3):
        (again,) = slow.talk.send(message)
        assert_ok(again)
        assert unpack(again.arrays[0], Saved) == first
        assert slow.finish() == []
    assert len(written) == 1


def test_while_it_saves_the_latest_repeat_is_answered(dirname: str) -> None:
    """On a connection that was made anew: the one before it leads nowhere."""
    slow = Slow(TableSpec("rows", dim=1, rule=SGD), dirname)
    slow.talk.pull(slow.spec, np.arange(50))
    message = slow.begin()
    assert slow.server.handle("another way", encode(message), None) == []
    ((peer, _),) = slow.finish()
    assert peer == "another way"


def test_a_repeat_of_a_save_that_failed_gets_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    slow = Slow(TableSpec("rows", dim=1, rule=SGD), str(tmp_path / "file" / "model"))
    slow.talk.pull(slow.spec, np.arange(50))
    message = slow.begin()
    ((_, frames),) = slow.finish()
    kind, text = refusal(decode_reply(frames))
    assert kind == "CheckpointError"
    assert str(tmp_path / "file") in text
    (tmp_path / "file").unlink()
    (again,) = slow.talk.send(message)
    assert refusal(again) == (kind, text)


def test_several_saves_at_once_are_made_one_after_the_other(tmp_path: Path) -> None:
    slow = Slow(TableSpec("rows", dim=1, rule=SGD), "")
    slow.talk.pull(slow.spec, np.arange(50))
    for token in (1, 2, 3):
        slow.begin(token, f"save-{token}", str(tmp_path / str(token)))
    replies = slow.finish()
    assert len(replies) == 3
    for token, (_, frames) in zip((1, 2, 3), replies, strict=True):
        reply = decode_reply(frames)
        assert_ok(reply)
        made = unpack(reply.arrays[0], Saved)
        (part,) = made.parts
        manifest = Manifest(f"save-{token}", token, "full", 1, [], made.parts)
        assert read_part(Storage(str(tmp_path / str(token))), manifest.save, part)["keys"].size == 50


class Busy:
    """A server behind a network without a loop: whatever is asked, its jobs are done before it answers."""

    def __init__(self, server: Server) -> None:
        self.server, self.num_slices = server, 0

    def handle(self, peer: Any, frames: Any, role: Any) -> Any:
        replies = self.server.handle(peer, frames, role)
        deadline = time.monotonic() + WAIT
        while (worked := self.server.work()) is not None:
            assert time.monotonic() < deadline
            self.num_slices += 1
            time.sleep(0 if worked else 0.0005)
        return [*replies, *self.server.tick(time.monotonic())]

    def tick(self, now: float) -> Any:
        return self.server.tick(now)

    def work(self) -> Any:
        return self.server.work()


@pytest.mark.parametrize("seed", range(12))
def test_over_a_network_that_loses_and_repeats_every_server_saves_once(seed: int, tmp_path: Path) -> None:
    network = Network(seed, Faults(lose=0.4, repeat=0.4, delay=0.3))
    servers = [Busy(Server(1 << 22)) for _ in range(2)]
    client = Client([network.connect(server) for server in servers], patience=Patience(600.0, 10))
    spec = TableSpec("rows", dim=1, rule=SGD)
    client.create_table(spec)
    client.pull("rows", np.arange(40)).result()
    url = f"memory://lossy-{seed}"
    manifests = [save(client, [spec], url, seconds=600.0) for _ in range(3)]  # of virtual time
    network.deliver_all()
    assert [len(server.server.state.work.requests) for server in servers] == [3, 3]
    assert [manifest.number for manifest in manifests] == [1, 2, 3]
    assert contents(load(1, [spec], url))["rows"].keys() == set(range(40))


@pytest.mark.parametrize("role", [Role.WORKER])
def test_others_than_worker_0_may_not_save(role: Role, dirname: str) -> None:
    with in_process(2) as fleet:
        client = fleet.client(role=role, worker=1)
        with pytest.raises(PermissionRefused, match=naming("SAVE", "first_worker", "launcher", "worker")):
            client.save(dirname, "save-1", True, WAIT)
    assert not os.path.exists(dirname)


@pytest.mark.parametrize("role", [Role.FIRST_WORKER, Role.LAUNCHER])
def test_worker_0_and_the_launcher_may_save(role: Role, dirname: str) -> None:
    with in_process(2) as fleet:
        assert len(fleet.client(role=role).save(dirname, "save-1", True, WAIT)) == 2


@pytest.mark.parametrize(
    "folder",
    ["", ".", "..", "save-", "save-x", "save-1/..", "../save-1", "/save-1", "save-1\n", "save-" + "1" * 19, "save-٣"],
)
def test_a_folder_that_is_no_save_is_refused(folder: str, dirname: str) -> None:
    with in_process(1) as fleet, pytest.raises(WireError, match="save-NUMBER"):
        fleet.client().save(dirname, folder, True, WAIT)
    assert not os.path.exists(dirname)


@pytest.mark.parametrize(
    "fields",
    [{"dirname": 7}, {"dirname": None}, {"with_state": "yes"}, {"token": "x"}, {"token": 2**70}, {"more": 1}],
    ids=str,
)
def test_a_malformed_request_is_refused_and_the_server_lives_on(fields: dict[str, Any], dirname: str) -> None:
    slow = Slow(TableSpec("rows", dim=1, rule=SGD), dirname)
    try:
        message = save_message(slow.talk, dirname, **{"token": 1, **fields})
    except Exception:  # it cannot even be packed
        return
    (reply,) = slow.talk.send(message)
    assert refusal(reply)[0] == "WireError"
    assert slow.server.state.work.requests == {}
    assert slow.talk.pull(slow.spec, [1]).shape == (1, 1)


# Places that cannot be written to


@pytest.fixture(params=["in process", "behind a socket"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with in_process(2) if request.param == "in process" else in_threads(["tcp://127.0.0.1:0"] * 2) as made:
        yield made


PLACES = {
    "below a file": "{folder}/file/model",
    "a file": "{folder}/file",
    "no such device": "/proc/nothing/here",
    "a zero in it": "{folder}/a\0b",
    "too long": "{folder}/" + "x" * 300,
    "nothing": "",
    "a protocol that nobody knows": "foo://model",
    "a protocol without its arguments": "reference://model",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_place_that_cannot_be_written_is_an_error_and_the_servers_live_on(
    fleet: Fleet, place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    spec = TableSpec("rows", dim=2, rule=SGD)
    client = fleet.client(patience=Patience(WAIT, 1))
    client.create_table(spec)
    client.pull("rows", np.arange(20)).result()
    with pytest.raises(FleetError, match="SAVE") as caught:
        client.save(place.format(folder=tmp_path), "save-1", True, WAIT)
    assert isinstance(caught.value, CheckpointError)
    client.push("rows", [1], np.ones((1, 2), np.float32)).result()
    save(client, [spec], str(tmp_path / "model"))
    assert len(contents(load(1, [spec], str(tmp_path / "model")))["rows"]) == 20


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_disk_that_fills_up_is_an_error_and_the_old_model_stays(
    nth: int, dirname: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = specs_of(RULES["adam"])
    with in_process(1) as fleet:
        client = fleet.client()
        for spec in specs:
            client.create_table(spec)
        train(client, seed=1)
        save(client, specs, dirname)
        before = contents(fleet.servers)
        train(client, seed=2)
        numbers, write = iter(range(1, 100)), Storage.write

        def fill_up(self: Storage, name: str, buffers: Any) -> None:
            if next(numbers) >= nth:
                raise OSError(28, "No space left on device")
            write(self, name, buffers)

        monkeypatch.setattr(Storage, "write", fill_up)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(client, specs, dirname)
        monkeypatch.undo()
        assert contents(load(2, specs, dirname)) == before
        manifest = save(client, specs, dirname)
        assert contents(load(2, specs, dirname)) == contents(fleet.servers) != before
    assert sorted(os.listdir(dirname)) == ["manifest.json", manifest.save]


def test_a_mistake_of_our_own_in_the_middle_of_a_save_does_not_end_the_server(
    fleet: Fleet, dirname: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TableSpec("rows", dim=2, rule=SGD)
    client = fleet.client(patience=Patience(WAIT, 1))
    client.create_table(spec)
    client.pull("rows", np.arange(20)).result()

    def fail(*_: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(SparseTable, "stored_chunks", fail)
    with pytest.raises(FleetError, match="SAVE"):
        client.save(dirname, "save-1", True, WAIT)
    monkeypatch.undo()
    save(client, [spec], dirname)


# Real processes, real time


@pytest.mark.slow
def test_while_a_server_saves_it_serves_and_rows_stay_consistent(dirname: str) -> None:
    """Pushes during the save are counted, not timed: on a busy machine any of them may take long, and all may wait for
    the end of a save. A server that did not serve meanwhile would never apply four."""
    spec = TableSpec("rows", dim=16, rule=Rule("adagrad", lr=0.5))
    keys = np.arange(400_000)
    with in_processes(1) as fleet:
        client, other = fleet.client(), fleet.client(worker=1, role=Role.WORKER)
        client.create_table(spec)
        other.attach(spec)
        for start in range(0, len(keys), 50_000):
            client.pull("rows", keys[start : start + 50_000]).result()
        over = threading.Event()
        num_pushes = 0

        def use() -> None:
            nonlocal num_pushes
            rng = np.random.default_rng(0)
            while not over.is_set():
                other.pull("rows", rng.integers(0, len(keys), 500)).result()
                other.push("rows", keys[::1000], np.ones((400, 16), np.float32)).result()
                num_pushes += 1

        user = threading.Thread(target=use)
        user.start()
        try:
            deadline = time.monotonic() + WAIT
            while num_pushes < 2 and time.monotonic() < deadline:  # the first ones load kernels
                time.sleep(0.001)
            num_meanwhile, num_saves = 0, 0
            while num_meanwhile < 4 and num_saves < 20:
                num_before, num_saves = num_pushes, num_saves + 1
                save(client, [spec], saved := f"{dirname}-{num_saves}")
                num_meanwhile = num_pushes - num_before
        finally:
            over.set()
            user.join(WAIT)
    assert num_meanwhile >= 4
    rows = dict(rows_on_disk(saved, "rows"))
    assert rows.keys() == set(keys.tolist())
    known = constant_pushes(num_pushes, 0.5, 16)
    for key in range(0, len(keys), 1000):
        assert rows[key][:16].tolist() == known[float(rows[key][16])]
    assert read_manifest(Storage(saved)).table("rows").rows == len(keys)
