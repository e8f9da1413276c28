"""A server of a saved model: its shard of the rows as they were saved, and refusals of all that changes rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.fleets import ForkedServer, Talk, keys_of, push_arrays, refusal, values_of
from support.jobs import NUM_WORDS, TABLES, Net, fleet_optimizer, make_batch, one_worker

from torchfleet.base.errors import CheckpointError, FleetError, PermissionRefused
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.net.wire import BOUNDED, NO_CREATE, SYNC, VERSIONS, Command, Role, pack, unpack
from torchfleet.ps.server.job.main import main
from torchfleet.ps.server.read_only import serve_saved, served_spec, shard_of
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client

Rows = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Rows]:
    """A folder with a model of three tables, and their rows."""
    folder = str(tmp_path_factory.mktemp("read_only") / "model")
    with one_worker(Net(), fleet_optimizer("adam", lr=0.1), num_servers=2) as part:
        for seed in range(3):
            part.step(make_batch(seed))
        part.worker.save(folder, "full")
        client = part.worker.client
        rows = {name: client.pull(name, np.arange(num), create=False).result() for name, num in TABLES.items()}
    return folder, rows


def specs_of(folder: str) -> dict[str, TableSpec]:
    return {table.name: served_spec(table) for table in read_manifest(Storage(folder)).tables if not table.is_dense}


def served(folder: str, shard: int = 0, num_shards: int = 1) -> Talk:
    server = Server(1 << 26)
    serve_saved(server, folder, shard, num_shards)
    return Talk(server)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_shards_have_all_rows_as_they_were_saved(model: tuple[str, Rows], num_shards: int) -> None:
    folder, rows = model
    for shard in range(num_shards):
        talk = served(folder, shard, num_shards)
        for name, spec in specs_of(folder).items():
            keys = np.arange(TABLES[name], dtype=np.uint64)
            own = keys[owners_of(spec, keys, num_shards) == shard]
            np.testing.assert_array_equal(talk.pull(spec, own, flags=NO_CREATE), rows[name][own])


def test_everything_but_reads_is_refused_and_changes_nothing(model: tuple[str, Rows]) -> None:
    folder, rows = model
    talk, spec = served(folder), specs_of(folder)["words"]
    keys = np.arange(NUM_WORDS)
    grads = np.ones((NUM_WORDS, spec.dim))
    changes = [
        talk.push(spec, keys, grads),
        talk.ask(Command.PULL, keys_of(spec, keys)),  # creates rows
        talk.ask(Command.PULL, keys_of(spec, keys), flags=NO_CREATE | SYNC),
        talk.ask(Command.PULL, keys_of(spec, keys), flags=NO_CREATE | BOUNDED),
        talk.ask(Command.SET, keys_of(spec, keys), values_of(spec, grads), once=True),
        talk.ask(Command.ERASE, keys_of(spec, keys), once=True),
        talk.ask(Command.CREATE_TABLE, pack(TableSpec("more"))),
        talk.ask(Command.SAVE, pack({"dirname": folder, "folder": "save-9", "with_state": True, "token": 1})),
        talk.ask(Command.CLOCK, pack({"now": 1, "token": 2})),
        talk.ask(Command.SHRINK, pack({"table": "words", "policy": {}, "token": 3})),
        talk.ask(Command.JOIN, pack({"host": "h", "pid": 1})),
        talk.ask(Command.LEAVE),
        talk.ask(Command.BARRIER, pack({"name": "b", "num_workers": 1, "timeout": 1.0}), once=True),
        talk.ask(Command.PULL_CHANGED, keys_of(spec, [0])),
    ]
    assert {refusal(reply)[0] for reply in changes} == {PermissionRefused.__name__}
    np.testing.assert_array_equal(talk.pull(spec, keys, flags=NO_CREATE | VERSIONS), rows["words"])
    (body,) = talk.ask(Command.STATS).arrays
    assert {"save-000001", 0, 1} <= set(unpack(body, dict)["served"].values())


def test_a_worker_is_refused_as_the_launcher_is(model: tuple[str, Rows]) -> None:
    talk = served(model[0])
    talk.role = Role.FIRST_WORKER
    spec = specs_of(model[0])["words"]
    assert (
        refusal(talk.ask(Command.PUSH, *push_arrays(spec, [1], np.ones((1, 3))), once=True))[0] == "PermissionRefused"
    )


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "a/b", "0/100000"])
def test_a_wrong_shard_is_refused(text: str) -> None:
    with pytest.raises(FleetError):
        shard_of(text)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        serve_saved(Server(1 << 26), str(tmp_path), 0, 1)


@pytest.mark.parametrize(
    "options",
    [("--shard", "0/2"), ("--read_only", "m", "--num_workers", "1"), ("--read_only", "m", "--durability", "log")],
)
def test_contradicting_options_end_the_server(options: tuple[str, ...]) -> None:
    assert main(list(options)) == 2


@pytest.mark.slow
def test_a_process_serves_a_shard_and_refuses_a_push(model: tuple[str, Rows]) -> None:
    folder, rows = model
    options = "--read_only", folder, "--shard"
    with (
        ForkedServer("tcp://127.0.0.1:0", *options, "0/2") as first,
        ForkedServer("tcp://127.0.0.1:0", *options, "1/2") as second,
        Client.connect([first.endpoint, second.endpoint]) as client,
    ):
        for name, spec in specs_of(folder).items():
            client.attach(spec)
            found = client.pull(name, np.arange(TABLES[name]), create=False).result()
            np.testing.assert_array_equal(found, rows[name])
        with pytest.raises(PermissionRefused):
            client.push("words", [1], np.ones((1, 3), np.float32)).result()
