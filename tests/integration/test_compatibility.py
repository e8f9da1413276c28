"""Formats on disk and on the wire are those of the record in support/recorded, which a release must go on reading."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support import logged_work, public_names
from support.conversation import Exchange, Wire, answers, converse
from support.extras import Late
from support.jobs import clean_facade
from support.paths import SUPPORT
from support.recorded_log import rows_of
from support.recorded_model import STEPS, Model, batch_of

import torchfleet as fleet
from torchfleet.observe.commands.command import main as fleet_command
from torchfleet.ps.net import wire
from torchfleet.ps.server.log.durable_server import Durability, go_on
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client

safetensors = Late("safetensors.numpy")

RECORDED = SUPPORT / "recorded"
CLOSE = 1e-6  # other processors round a multiplication and addition in one step: the record was made on x86-64


@pytest.fixture(scope="module")
def recorded() -> list[Exchange]:
    return [
        Exchange(server, peer, request, [tuple(reply) for reply in replies])
        for server, peer, request, replies in json.loads((RECORDED / "wire.json").read_text())
    ]


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What takes the place of random numbers of clients, servers and long requests."""
    value = [0]
    monkeypatch.setattr(secrets, "randbits", lambda bits: value[0])
    return value


def make_server() -> Server:
    return Server(num_workers=2, max_table_bytes=1 << 22)


def test_a_server_answers_the_recorded_requests_as_recorded(recorded: list[Exchange], dice: list[int]) -> None:
    dice[0] = 900
    servers = [make_server(), make_server()]
    for exchange in recorded:
        found = answers(servers[exchange.server], exchange.peer, frames_of(exchange.request))
        assert [to for to, _ in found] == [to for to, _ in exchange.replies]
        for (_, reply), (_, expected) in zip(found, exchange.replies, strict=True):
            assert_same_reply(reply, frames_of(expected))


@pytest.mark.parametrize("version", [1, wire.VERSION + 1])
def test_a_client_of_another_version_is_answered_with_its_call_and_both_versions(
    recorded: list[Exchange], version: int
) -> None:
    server = make_server()
    for exchange in recorded[::7]:
        head, *rest = frames_of(exchange.request)
        ((_, reply),) = answers(server, exchange.peer, [head[:4] + bytes([version]) + head[5:], *rest])
        found = wire.decode_reply(reply)
        assert (found.status, found.call) == (wire.ERROR, wire.call_of([head]))
        error = msgspec.msgpack.decode(reply[1])
        assert error["kind"] == "WireError"
        assert re.findall(r"\d+", error["text"]) == [str(wire.VERSION), str(version)]


def test_workers_send_the_recorded_requests(recorded: list[Exchange], dice: list[int]) -> None:
    def spec(fields: dict[str, Any]) -> TableSpec:
        return msgspec.convert(fields, TableSpec)

    def set_dice(value: int) -> None:
        dice[0] = value

    found = converse(Wire(make_server, Client, spec, Shrink, wire.Array, wire.Role, wire, set_dice))
    for exchange, expected in zip(found, recorded, strict=True):
        assert (exchange.server, exchange.peer) == (expected.server, expected.peer)
        assert exchange.request == expected.request


def test_the_record_has_every_command_but_those_that_look_at_clocks_and_disks(
    recorded: list[Exchange],
) -> None:
    said = {wire.decode(frames_of(exchange.request)).command for exchange in recorded}
    between_servers = {wire.Command.FOLLOW, wire.Command.APPEND, wire.Command.CONFIRM, wire.Command.LOST}
    of_heter_workers = {wire.Command.FORWARD, wire.Command.BACKWARD}
    unrecorded = {wire.Command.STATS, wire.Command.SAVE, wire.Command.WALK, wire.Command.SUBSCRIBE, *of_heter_workers}
    newer = {wire.Command.STARTING}  # than the record
    assert set(wire.Command) - said - between_servers == unrecorded | newer


def frames_of(frames: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in frames]


def assert_same_reply(found: list[bytes], expected: list[bytes]) -> None:
    """Headers, whole numbers and texts to the byte; float32 numbers to rounding."""
    assert found[0] == expected[0]
    arrays = (wire.decode(found).arrays, wire.decode(expected).arrays)
    for array, other in zip(*arrays, strict=True):
        if other.data.dtype == np.float32:
            np.testing.assert_allclose(array.data, other.data, rtol=CLOSE, atol=CLOSE)
        else:
            np.testing.assert_array_equal(array.data, other.data)


@pytest.fixture
def recorded_model(tmp_path: Path) -> Path:
    """A copy: what is saved there must not change the record."""
    shutil.copytree(RECORDED / "model", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def expected() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((RECORDED / "expected.json").read_text())
    return found


@pytest.fixture
def facade() -> Iterator[None]:
    with clean_facade():
        yield


@pytest.mark.usefixtures("facade")
def test_training_goes_on_from_a_full_save_and_its_delta(
    recorded_model: Path, expected: dict[str, list[float]]
) -> None:
    fleet.init()
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    fleet.init_worker(str(recorded_model))
    assert fleet.saved_extra(str(recorded_model)) == {"epoch": 2}
    losses = []
    for step in range(STEPS, STEPS + 3):
        *inputs, target = batch_of(step)
        loss = torch.nn.functional.mse_loss(model(*inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    assert fleet.save_persistables(str(recorded_model)) == 3
    fleet.stop_worker()


def test_predictions_of_the_recorded_model_are_the_recorded_ones(expected: dict[str, list[float]]) -> None:
    model = fleet.load_inference_model(str(RECORDED / "inference"), Model())
    with torch.no_grad():
        scores = model(*batch_of(100)[:-1])
    assert scores.tolist() == pytest.approx(expected["scores"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["model", "inference", "collective"])
def test_every_file_of_a_recorded_save_fits_its_checksum(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet_command(["inspect", str(RECORDED / name), "--check"]) == 0
    assert re.search(r"\d+ (files|pieces)", capsys.readouterr().out)


def test_a_recorded_collective_save_is_read_to_the_bit(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert fleet_command(["export", str(RECORDED / "collective"), "--out", str(out)]) == 0
    found, before = safetensors.load_file(out), safetensors.load_file(RECORDED / "collective.safetensors")
    assert found.keys() == before.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.slow
def test_a_recorded_log_is_read(tmp_path: Path) -> None:
    """The log of a server of this release: a server of a later one goes on from it."""
    shutil.copytree(RECORDED / "log", tmp_path / "log")
    (tmp_path / "log").chmod(0o700)
    server = logged_work.make_server()
    durable = go_on(server, Durability(tmp_path / "log"), lambda text: None)
    assert durable is not None
    durable.close()
    expected, found = json.loads((RECORDED / "log.json").read_text()), rows_of(server)
    assert found.keys() == expected.keys()
    for table, rows in expected.items():
        assert found[table]["step"] == rows["step"], table
        np.testing.assert_allclose(found[table]["sums"], rows["sums"], rtol=CLOSE, atol=100 * CLOSE, err_msg=table)


def kept(recorded: list[str], found: list[str]) -> bool:
    """Whether calls with the recorded arguments still work: none is gone or out of its place, none is needed that was
    not, and new ones may be left out and stand behind."""
    old, new = ([one.rstrip("=") for one in given] for given in (recorded, found))
    optional = {one[:-1] for one in found if one.endswith("=")}
    was_optional = {one[:-1] for one in recorded if one.endswith("=")}
    return new[: len(old)] == old and was_optional <= optional and set(new[len(old) :]) <= optional


def test_names_that_were_public_are_there_with_their_arguments() -> None:
    recorded = json.loads((RECORDED / "names.json").read_text())["names"]
    found = public_names.names()
    assert sorted(set(recorded) - set(found)) == [], "these are gone: a release that raises the middle number"
    assert [name for name, arguments in recorded.items() if not kept(arguments, found[name])] == []


def test_flags_of_the_commands_are_there() -> None:
    recorded = json.loads((RECORDED / "names.json").read_text())["flags"]
    found = public_names.flags()
    assert {name: sorted(set(flags) - set(found.get(name, ()))) for name, flags in recorded.items()} == {
        name: [] for name in recorded
    }


def test_arguments_may_be_added_and_not_changed() -> None:
    assert kept(["a", "b="], ["a", "b=", "c="])
    assert kept(["a"], ["a="])
    for changed in (["b=", "a"], ["a"], ["a", "b"], ["a", "b=", "c"], ["a", "c=", "b="]):
        assert not kept(["a", "b="], changed), changed
