"""Tables larger than memory behind real servers and in training."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import each_of
from support.fleets import ForkedServer
from support.messages import names

import torchfleet as fleet
from torchfleet.base.errors import FleetError, ModelError, TableError
from torchfleet.launch.server_launcher import tier_variables
from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.tiers.cold_file import file_error
from torchfleet.ps.worker.client.client import Client

NUM_ROWS = 1_000_000  # of which memory holds about seven tenths
PART = 50_000
SPEC = TableSpec("rows", dim=2, rule=Rule(lr=1.0), initializer=Initializer("constant", 0.0))


def connect(server: ForkedServer) -> Client:
    return Client([SocketChannel(server.endpoint, None, Role.FIRST_WORKER)])


@pytest.mark.slow
def test_a_killed_server_has_all_rows_that_it_acknowledged(tmp_path: Path) -> None:
    """With a log, the server has the same rows in memory and on disk again; the file of the killed one is gone."""
    cold = tmp_path / "cold"
    cold.mkdir()
    options = ("--durability", "log", "--log_store", str(tmp_path / "log"))
    tiers = ("--table_memory", "64MiB", "--table_path", str(cold))
    num_pushes = 0
    for kill in range(2):
        with ForkedServer("tcp://127.0.0.1:0", *options, *tiers) as server, connect(server) as client:
            client.create_table(SPEC)
            for start in range(0, NUM_ROWS, PART):
                keys = np.arange(start, start + PART, dtype=np.uint64)
                before = client.pull("rows", keys).result()
                assert np.array_equal(before, np.full((PART, 2), -float(kill), np.float32))
                client.push("rows", keys, np.ones((PART, 2), np.float32)).result()
                num_pushes += 1
            stats = client.stats()[0]["tables"]["rows"]
            assert stats["rows"] == NUM_ROWS
            assert stats["cold_rows"] > NUM_ROWS // 5
            assert not list(cold.iterdir())
            server.kill()
    assert num_pushes == 2 * NUM_ROWS // PART


@pytest.mark.parametrize("where", ["outside", "/proc/self"])
def test_a_path_that_comes_by_message_must_be_below_the_servers_own(where: str, tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    place = str(tmp_path / where) if where == "outside" else where
    with ForkedServer("tcp://127.0.0.1:0", "--table_path", str(tmp_path / "cold")) as server, connect(server) as client:
        spec = TableSpec("rows", dim=2, storage=TierStorage(64 << 20, place))
        with pytest.raises(FleetError, match="--table_path"):
            client.create_table(spec)
        assert not (tmp_path / "outside").exists()
        client.create_table(TableSpec("rows", dim=2, storage=TierStorage(64 << 20, str(tmp_path / "cold"))))


class Model(torch.nn.Module):
    def __init__(self, **storage: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = fleet.nn.SparseEmbedding(4, name="rows", **storage)  # type: ignore[arg-type]
        self.last = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.rows(ids).sum(1))
        return out


def train(folder: Path, **storage: object) -> None:
    fleet.init()
    model = fleet.distributed_model(Model(**storage))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    fleet.init_worker()
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        loss = model(torch.randint(0, 5000, (64, 8), generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.save_persistables(str(folder / "model"))
    fleet.stop_worker()


def test_training_has_the_result_of_tables_in_memory(tmp_path: Path) -> None:
    storage = fleet.Tiered(memory="64MiB", path=tmp_path / "rows")
    ids = torch.arange(5000).reshape(-1, 8)
    made = []
    for name, settings in (("plain", {}), ("tiered", {"storage": storage})):
        train(tmp_path / name, **settings)
        loaded = fleet.load_inference_model(str(tmp_path / name / "model"), Model())
        made.append(loaded(ids))
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"storage": "8GB"}, "Tiered"), ({"num_embeddings": 9, "storage": fleet.Tiered("1GB", "x")}, "num_embeddings")],
)
def test_wrong_storages_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        Model(**settings)


@each_of("memory", ["much", "0", "1MB", -1, True])
def test_wrong_sizes_of_memory_are_refused(memory: str | int) -> None:
    with pytest.raises(TableError, match="memory"):
        fleet.Tiered(memory, "rows")


def test_memory_without_a_folder_is_refused() -> None:
    with pytest.raises(FleetError, match="--table_path"):
        tier_variables("8GB", None)


def test_a_job_that_has_ended_holds_no_file_of_cold_rows(tmp_path: Path) -> None:
    """Not even until garbage is collected: nobody sees the space that a file without a name takes."""
    folder, kept = tmp_path / "rows", []
    gc.disable()
    try:
        for _ in range(2):
            train(tmp_path, storage=fleet.Tiered(memory="64MiB", path=folder))
            files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
            kept.append([file for file in files if file.startswith(str(folder))])
    finally:
        gc.enable()
    assert kept == [[], []]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_only_a_full_disk_is_to_be_made_larger(number: int) -> None:
    text = str(file_error("/disk/rows", "cannot be read", number))
    assert names(text, "/disk/rows", os.strerror(number))
    assert names(text, "larger disk") == (number != errno.EIO)
    assert names(text, "last save or log") == (number == errno.EIO)
