"""Rows from read-only servers, against those of the training: sizes, caches, and servers that are killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.extras import needs
from support.fleets import ForkedServer
from support.jobs import SECONDS, TABLES, Net, fleet_optimizer, make_batch, one_worker, wait_until
from support.serving import Clicks, as_json, clicks_batch, save_clicks, serving

import torchfleet as fleet
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.shards import shard_replica
from torchfleet.apps.serve.shards.shard_replica import PROBE_PAUSE
from torchfleet.apps.serve.shards.sharded_model import ShardedModel, endpoints_of
from torchfleet.base.errors import CheckpointError, FleetError, ServerUnreachable
from torchfleet.launch.roles import free_ports

pytestmark = pytest.mark.slow  # it starts processes

NUM_SHARDS = 2
TIMEOUT = 5.0  # that a server may not run, on busy cores, before its reads fail


class Served:
    """A saved model, its rows, and two servers for each shard."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with one_worker(Net(), fleet_optimizer("adam", lr=0.1)) as part:
            for seed in range(3):
                part.step(make_batch(seed))
            part.worker.save(folder, "full")
            client = part.worker.client
            self.rows = {name: client.pull(name, np.arange(n), create=False).result() for name, n in TABLES.items()}
            self.state = {name: value.clone() for name, value in part.model.named_parameters() if value.numel()}
        self.columns = [[self.start(i) for i in range(NUM_SHARDS)] for _ in range(2)]

    def start(self, shard: int, endpoint: str = "") -> ForkedServer:
        endpoint = endpoint or f"tcp://127.0.0.1:{free_ports(1)[0]}"  # claimed: it may be started again there
        return ForkedServer(endpoint, "--read_only", self.folder, "--shard", f"{shard}/{NUM_SHARDS}")

    def endpoints(self, column: int) -> list[str]:
        return [server.endpoint for server in self.columns[column]]

    def check(self, model: ShardedModel) -> None:
        for name, expected in self.rows.items():
            found = model.current().rows(name, np.arange(TABLES[name]))
            np.testing.assert_array_equal(found, expected)

    def close(self) -> None:
        for server in (*self.columns[0], *self.columns[1]):
            server.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(str(tmp_path_factory.mktemp("sharded") / "model"))
    yield made
    made.close()


@pytest.fixture
def model(served: Served) -> Iterator[ShardedModel]:
    made = ShardedModel(served.folder, served.endpoints(0), served.endpoints(1), cache_bytes=0, timeout=TIMEOUT)
    yield made
    made.close()


def test_rows_and_parameters_are_those_of_the_training(served: Served, model: ShardedModel) -> None:
    served.check(model)
    version = model.current()
    assert version.dim("words") == 3
    for name, value in served.state.items():
        if name in version.parameters():
            np.testing.assert_array_equal(version.parameters()[name].numpy(), value.detach().numpy())
    assert set(version.parameters()) == {"hidden.weight", "hidden.bias", "out.weight", "out.bias"}


def test_keys_may_repeat_and_those_without_a_row_read_as_zeros(served: Served, model: ShardedModel) -> None:
    keys = np.array([5, 3, 5, 10_000, -1, 3])
    found = model.current().rows("words", keys)
    np.testing.assert_array_equal(found[[0, 1, 2, 5]], served.rows["words"][[5, 3, 5, 3]])
    assert not found[3:5].any()
    assert model.current().rows("words", np.empty(0, np.int64)).shape == (0, 3)
    with pytest.raises(CheckpointError):
        model.current().rows("other", keys)


def test_a_cache_answers_the_second_time(served: Served) -> None:
    model = ShardedModel(served.folder, served.endpoints(0), cache_bytes=1 << 20, timeout=TIMEOUT)
    try:
        served.check(model)
        num_reads = model.metrics()["shard_reads"]
        served.check(model)
        found = model.metrics()
    finally:
        model.close()
    assert found["shard_reads"] == num_reads
    assert found["row_cache_hits"] == found["row_cache_misses"] > 0
    assert found["row_cache_bytes"] <= 1 << 20


def test_a_stopped_server_is_answered_for_by_its_backup(served: Served, model: ShardedModel) -> None:
    served.check(model)
    stopped = served.columns[0][1]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        for _ in range(20):
            served.check(model)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    found = model.metrics()
    assert found["shard_hedged_reads_won"] >= 1
    assert found["shard_failed_reads"] == 0


def test_a_killed_server_is_answered_for_and_comes_back(served: Served, model: ShardedModel) -> None:
    served.check(model)
    killed = served.columns[0][0]
    killed.kill()
    began = time.monotonic()
    while time.monotonic() - began < 1.5 * TIMEOUT:  # beyond the time-out of the read that the killed one had
        served.check(model)
    assert model.metrics()["shard_failed_reads"] == 0
    wait_until(lambda: model.metrics()["shard_replicas_lost"] == 1, "the killed server is lost")
    served.columns[0][0] = served.start(0, killed.endpoint)

    def is_back() -> bool:
        served.check(model)
        time.sleep(PROBE_PAUSE / 10)
        return not model.metrics()["shard_replicas_lost"]

    wait_until(is_back, "the server that was started again is found")
    served.check(model)


def test_without_a_backup_reads_fail_soon_and_work_again_later(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    own = served.start(0)
    model = ShardedModel(served.folder, [own.endpoint, served.endpoints(0)[1]], cache_bytes=0, timeout=TIMEOUT)
    try:
        own.kill()
        with pytest.raises(ServerUnreachable):
            served.check(model)
        began = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(shard_replica, "PROBE_PAUSE", SECONDS)  # nobody looks for it meanwhile
            patch.setattr(model._shards[0].replicas[0], "_timeout", SECONDS)
            with pytest.raises(ServerUnreachable):
                served.check(model)
        assert time.monotonic() - began < SECONDS / 2  # it is known to be lost
        again = served.start(0, own.endpoint)

        def is_back() -> bool:
            try:
                served.check(model)
            except ServerUnreachable:
                time.sleep(PROBE_PAUSE / 10)
                return False
            return True

        wait_until(is_back, "the shard answers again")
        again.close()
    finally:
        model.close()


def test_servers_of_another_shard_or_save_are_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(FleetError):
        ShardedModel(served.folder, served.endpoints(0)[::-1])
    with pytest.raises(FleetError):
        ShardedModel(served.folder, served.endpoints(0)[:1])
    with one_worker(Net()) as part:
        part.worker.save(str(tmp_path / "other"), "full")
    with pytest.raises(FleetError):
        ShardedModel(str(tmp_path / "other"), served.endpoints(0))
    with pytest.raises(FleetError), ForkedServer() as plain:
        ShardedModel(served.folder, [plain.endpoint, served.endpoints(0)[1]])
    with pytest.raises(FleetError):
        ShardedModel(served.folder, served.endpoints(0), served.endpoints(1)[:1])


def test_addresses_are_separated_by_commas() -> None:
    assert endpoints_of("--shards", "a:1, b:2") == ["tcp://a:1", "tcp://b:2"]
    with pytest.raises(FleetError):
        endpoints_of("--shards", "a:1,,b:2")


def test_fleet_serve_answers_from_shards_while_one_is_killed(tmp_path: Path) -> None:
    needs("uvicorn", "httptools", "prometheus_client")
    save_clicks(tmp_path / "model")
    batch = clicks_batch(8, 3)
    expected = fleet.load_inference_model(str(tmp_path / "model"), Clicks())(**batch).tolist()
    options = "--read_only", str(tmp_path / "model")
    with (
        ForkedServer("tcp://127.0.0.1:0", *options) as shard,
        ForkedServer("tcp://127.0.0.1:0", *options) as backup,
        serving(
            tmp_path / "model", "--shards", shard.endpoint, "--backups", backup.endpoint, "--row_cache", "0"
        ) as web,
    ):
        for killed in (None, shard, backup):
            if killed is not None:
                killed.kill()
            else:
                assert web.get("/v2/health/ready") == (200, {"ready": True})
            if killed is backup:  # without any request for predictions
                wait_until(lambda: web.get("/v2/health/ready") == (503, {"ready": False}), "a shard without a replica")
                assert web.get("/v2/models/model/ready") == (503, {"name": "model", "ready": False})
                assert web.get("/v2/health/live")[0] == 200
            status, found = web.infer(as_json(batch))
            if killed is backup:
                assert status == 503
            else:
                assert found["outputs"][0]["data"] == pytest.approx(expected, abs=1e-5)
        metrics = web.request("GET", "/metrics")[1].decode()
        assert "torchfleet_serve_shard_reads_total" in metrics
        assert "torchfleet_serve_row_cache_hit_rate" in metrics


def test_settings_that_contradict_shards_are_refused(tmp_path: Path) -> None:
    for settings in (
        ServeSettings(str(tmp_path), shards="a:1", follow="servers=b:1"),
        ServeSettings(str(tmp_path), backups="a:1"),
    ):
        with pytest.raises(FleetError):
            settings.checked()
