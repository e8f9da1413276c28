"""Shards that follow training: rows of read-only servers, and over them what was saved since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support import processes
from support.fleets import ForkedServer
from support.jobs import TABLES, Net, Part, fleet_optimizer, make_batch, one_worker, wait_until

from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.apps.serve.shards.followed_shards import FollowedShards, open_followed_shards
from torchfleet.apps.serve.versions.saved_chain import SavedChain
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.ps.worker.model_saving import Kind

pytestmark = pytest.mark.slow  # it starts processes


class Job:
    """A worker that trains and saves, and two read-only servers of its first save."""

    def __init__(self, folder: Path, part: Part) -> None:
        self.folder, self._part, self._seed = str(folder), part, 0
        self.save("full")
        options = "--read_only", self.folder, "--shard"
        self.servers = [ForkedServer("tcp://127.0.0.1:0", *options, f"{i}/2") for i in range(2)]

    def settings(self, work: Path) -> ServeSettings:
        shards = ",".join(server.endpoint for server in self.servers)
        return ServeSettings(self.folder, shards=shards, follow="files", workdir=str(work)).checked()

    def train(self) -> None:
        for _ in range(2):
            self._part.step(make_batch(self._seed))
            self._seed += 1

    def save(self, kind: Kind) -> None:
        self.train()
        client = self._part.worker.client
        client.erase("tags", np.array([self._seed % TABLES["tags"]], np.uint64))
        self._part.worker.save(self.folder, kind)
        self.rows = {name: client.pull(name, np.arange(n), create=False).result() for name, n in TABLES.items()}
        self.state = {name: value.clone() for name, value in self._part.model.named_parameters() if value.numel()}

    def is_served(self, model: FollowedShards) -> bool:
        version = model.current()
        same = [np.array_equal(version.rows(name, np.arange(TABLES[name])), rows) for name, rows in self.rows.items()]
        found = version.parameters()
        return all(same) and all(torch.equal(found[name], value) for name, value in self.state.items())


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("torchfleet.apps.serve.versions.follow_process.subprocess.Popen", processes.Popen)
    for module in ("followed_shards", "sharded_model"):  # a server may not run for seconds
        monkeypatch.setattr(f"torchfleet.apps.serve.shards.{module}.TIMEOUT", 60.0)
    with one_worker(Net(), fleet_optimizer("adam", lr=0.1)) as part:
        made = Job(tmp_path / "model", part)
        yield made
        for server in made.servers:
            server.close()


def test_saves_since_that_of_the_servers_are_over_their_rows(job: Job, tmp_path: Path) -> None:
    job.save("delta")  # the servers have not read this one
    work = tmp_path / "work"
    work.mkdir()
    model = open_followed_shards(job.settings(work))
    try:
        assert job.is_served(model)
        for _ in range(3):
            before = model.current()
            kept = {name: before.rows(name, np.arange(num)) for name, num in TABLES.items()}
            job.save("delta")
            wait_until(lambda: job.is_served(model), "the save is served")
            assert model.current().number > before.number
            for name, rows in kept.items():  # a batch that has begun ends with its version
                np.testing.assert_array_equal(before.rows(name, np.arange(TABLES[name])), rows)
        assert not model.figures()["follow_is_in_trouble"]
        number = model.current().number
        job.save("full")  # does not contain the save of the servers
        wait_until(lambda: bool(model.figures()["follow_is_in_trouble"]), "the gap is told")
        assert model.current().number == number
    finally:
        model.close()
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(CheckpointError):
        open_followed_shards(job.settings(again))


def test_a_save_of_the_same_name_by_another_run_is_refused(job: Job) -> None:
    news = SavedChain(job.folder).news()
    assert news is not None
    (link,) = news.links
    assert SavedChain(job.folder, link.save, link.time).news() is not None
    with pytest.raises(CheckpointError):
        SavedChain(job.folder, link.save, link.time - 1).news()


def test_beside_shards_saves_alone_are_followed(tmp_path: Path) -> None:
    with pytest.raises(FleetError):
        ServeSettings(str(tmp_path), shards="a:1", follow="servers=b:1").checked()
