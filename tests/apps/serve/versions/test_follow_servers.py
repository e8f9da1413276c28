"""A follower of running servers: its versions have the servers' rows and network, through restarts and silence."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chains import Chain
from support.fleets import LEAST_PATIENCE, ForkedServer, ServerThread

from torchfleet.apps.serve.versions import follower as follower_module
from torchfleet.apps.serve.versions import pushed_rows
from torchfleet.apps.serve.versions.follower import Follower, FollowSettings
from torchfleet.apps.serve.versions.mapped_version import MappedVersion
from torchfleet.apps.serve.versions.version_description import read_current
from torchfleet.apps.serve.versions.version_store import read_status
from torchfleet.launch.roles import free_ports
from torchfleet.ps.net.keys import KeyFolder, keygen
from torchfleet.ps.server.saves import changed_rows
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

ITEMS = TableSpec("items", dim=6, rule=Rule("sgd", lr=0.5), initializer=Initializer("uniform", -1.0, 1.0))
IDS = TableSpec("ids", "array", dim=2, size=400, rule=Rule("sgd", lr=0.5))
DENSE = TableSpec("dense.0", "dense", size=7, rule=Rule("adam", lr=0.125))  # as in the saves of Chain
SPECS = (ITEMS, IDS, DENSE)
ALL = np.arange(400)


class Training:
    """Two servers with tables, a worker, and the follower of both."""

    def __init__(
        self,
        folder: Path,
        keys: KeyFolder | None = None,
        key_dir: str | None = None,
        start: Callable[..., Any] = ServerThread,
    ) -> None:
        """`keys`: of servers and worker; `key_dir`: those that the follower has."""
        self._keys, self._start = keys, start
        places = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]  # claimed: they may be started again there
        self.servers = [start(place, *([keys] if keys else [])) for place in places]
        self.endpoints = [server.endpoint for server in self.servers]
        self.worker = self.connected()
        self.chain = Chain(str(folder / "model"), SPECS)
        self.chain.save(2, {"items": [(1, 1)], "ids": [(1, 1)]}, full=True)
        self.work = folder / "work"
        self.work.mkdir()
        self.told: list[str] = []
        settings = FollowSettings(str(folder / "model"), servers=self.endpoints, key_dir=key_dir, spacing=0.0)
        self.follower = Follower(self.work, settings, self.told.append)
        self.rng = np.random.default_rng(0)

    def lose_patience(self, monkeypatch: pytest.MonkeyPatch, patience: Patience) -> None:
        """From now on the follower waits less for its servers, on the connections that it has, too."""
        monkeypatch.setattr(follower_module, "_PATIENCE", patience)
        assert self.follower._client is not None
        for connection in self.follower._client._connections:
            connection._patience = patience

    def connected(self) -> Client:
        made = Client.connect(self.endpoints, self._keys, patience=LEAST_PATIENCE)
        for spec in SPECS:
            made.create_table(spec)
        return made

    def train(self) -> None:
        keys = self.rng.integers(0, 400, 60).astype(np.uint64)
        for spec in (ITEMS, IDS):
            self.worker.pull(spec.name, keys).result()
            self.worker.push(spec.name, keys, self.rng.standard_normal((60, spec.dim)).astype(np.float32)).result()
        self.worker.erase("items", self.rng.integers(0, 400, 7).astype(np.uint64))
        self.worker.push_dense("dense.0", self.rng.standard_normal(7).astype(np.float32)).result()

    def restart(self, number: int) -> None:
        """Another process at the same address, with empty tables."""
        self.servers[number].close()
        self.servers[number] = self._start(self.endpoints[number])
        self.worker.close()
        self.worker = self.connected()

    def version(self) -> MappedVersion:
        found = read_current(self.work)
        assert found is not None
        return MappedVersion(self.work, found)

    def assert_follows(self) -> None:
        version = self.version()
        for spec in (ITEMS, IDS):
            expected = self.worker.pull(spec.name, ALL.astype(np.uint64), create=False).result()
            np.testing.assert_array_equal(version.rows(spec.name, ALL), expected)
        block = self.worker.pull_dense("dense.0").result().reshape(-1)
        np.testing.assert_array_equal(version.parameters()["w"].numpy().reshape(-1), block[:4])
        np.testing.assert_array_equal(version.parameters()["b"].numpy(), block[4:])

    def close(self) -> None:
        self.follower.close()
        self.worker.close()
        for server in self.servers:
            server.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On busy cores a server may not run for some seconds."""
    monkeypatch.setattr(follower_module, "_PATIENCE", LEAST_PATIENCE)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setattr(follower_module, "RETRY", 0.0)
    made = Training(tmp_path)
    yield made
    made.close()


def test_the_first_version_is_the_save_and_the_next_ones_are_the_servers(training: Training) -> None:
    for _ in range(3):
        training.train()
    training.follower.step()
    assert training.version().number == 1
    training.follower.step()
    training.assert_follows()
    for _ in range(12):
        training.train()
        training.follower.step()
        training.assert_follows()
    assert read_status(training.work).num_resyncs == 1
    number = training.version().number
    training.follower.step()
    assert training.version().number == number


def test_the_key_of_a_worker_is_enough_to_follow(tmp_path: Path) -> None:
    keygen(tmp_path / "keys")
    (tmp_path / "own").mkdir()
    for name in ("server.key", "worker.key", "worker.key_secret"):
        shutil.copy(tmp_path / "keys" / name, tmp_path / "own" / name)
    training = Training(tmp_path, KeyFolder(tmp_path / "keys"), str(tmp_path / "own"))
    training.train()
    for _ in range(2):
        training.follower.step()
    training.assert_follows()
    training.close()


def test_replies_with_a_rest_are_read_up_to_one_moment(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_rows, "MAX_NUMBERS", 64)
    monkeypatch.setattr(pushed_rows, "_MARGIN", 0)
    monkeypatch.setattr(pushed_rows, "ASK_EVERY", 0.0)
    for _ in range(5):
        training.train()
        training.follower.step()
    training.assert_follows()


def test_servers_rest_from_answers_that_take_long(training: Training) -> None:
    every = training.follower.pause
    for _ in range(2):
        training.train()
        training.follower.step()
    pushed = training.follower._subscription()
    assert pushed.answer_seconds > 0
    for seconds, expected in ((0.001, every), (0.02, 0.8), (5.0, follower_module.LONGEST_REST)):
        pushed.answer_seconds = seconds
        assert training.follower.pause == pytest.approx(expected)


def test_a_restarted_server_is_read_anew(training: Training) -> None:
    training.train()
    for _ in range(2):
        training.follower.step()
    training.restart(1)
    training.train()
    training.follower.step()
    training.assert_follows()
    assert read_status(training.work).num_resyncs == 2


@pytest.mark.slow
def test_a_killed_server_changes_no_answer_and_is_followed_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "RETRY", 0.0)
    training = Training(tmp_path, start=ForkedServer)
    training.train()
    for _ in range(2):
        training.follower.step()
    training.lose_patience(monkeypatch, Patience(timeout=2.0, retries=0))
    number, expected = training.version().number, training.version().rows("items", ALL)
    training.servers[0].kill()
    training.follower.step()
    assert training.version().number == number
    np.testing.assert_array_equal(training.version().rows("items", ALL), expected)
    assert read_status(training.work).trouble
    training.restart(0)
    training.train()
    for _ in range(20):  # a server that has just started may be slow to answer
        training.follower.step()
        if not read_status(training.work).trouble:
            break
    training.assert_follows()
    training.close()


def test_without_servers_the_version_stays_and_newer_saves_are_taken_over(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.train()
    for _ in range(2):
        training.follower.step()
    training.lose_patience(monkeypatch, Patience(timeout=0.3, retries=0))
    number, expected = training.version().number, training.version().rows("items", ALL)
    for server in training.servers:
        server.close()
    training.follower.step()
    assert read_status(training.work).trouble
    assert training.version().number == number
    np.testing.assert_array_equal(training.version().rows("items", ALL), expected)
    monkeypatch.setattr(follower_module, "FILES_AFTER", 0.0)
    monkeypatch.setattr(training.follower.maker, "created", 0.0)  # the save that comes is newer
    training.chain.save(2, {"items": [(1, 1), (2, 2)], "ids": []}, full=True)
    training.follower.step()
    found = training.version().rows("items", np.array([1, 2, 3]))
    assert found[:, 0].tolist() == [1.0, 2.0, 0.0]
    training.lose_patience(monkeypatch, LEAST_PATIENCE)
    training.servers = [ServerThread(endpoint) for endpoint in training.endpoints]
    training.worker.close()
    training.worker = training.connected()
    training.train()
    for _ in range(20):  # servers that have just started may be slow to answer
        training.follower.step()
        if not read_status(training.work).trouble:
            break
    training.assert_follows()


def test_a_full_disk_loses_no_change(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.train()
    for _ in range(2):
        training.follower.step()
    number = training.version().number
    training.train()
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", _full)
        training.follower.step()
        training.follower.step()
    assert training.version().number == number
    assert read_status(training.work).num_disk_full == 2
    training.follower.step()
    training.assert_follows()


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_the_graph_of_a_newer_save_comes_with_the_servers_numbers(training: Training) -> None:
    """Servers have no graph: a job that was changed and started again has saved one."""
    training.chain.storage.write("serving.json", [b"1"])
    training.chain.save(1, {"items": [(1, 1)]}, full=True)
    for number in (1, 2):
        training.train()
        training.follower.step()
        training.follower.step()
        training.assert_follows()
        model = training.version().description.model
        assert model is not None
        assert model.sha256 == hashlib.sha256(str(number).encode()).hexdigest()
        training.chain.storage.write("serving.json", [b"2"])
        training.chain.save(1, {"items": [(1, 1)]}, full=True)
        training.follower._look_at_saves = 0.0
