"""A save to a store that does not answer: the server talks to no address that comes by message, and goes on serving."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.extras import needs
from support.fleets import WAIT, in_process, in_threads
from support.messages import naming

from torchfleet.base.errors import CheckpointError, RoleError
from torchfleet.ps.server.saves import save_writer
from torchfleet.ps.server.saves.save_roots import roots_of
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

SPEC = TableSpec("rows", dim=1, rule=Rule("sgd"))


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def address(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def asked(listening: socket.socket, seconds: float) -> bool:
    """Whether somebody has connected."""
    listening.settimeout(seconds)
    try:
        listening.accept()[0].close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("roots", [None, ["/", "memory://"], ["webhdfs://10.0.0.1:9870/"]])
def test_a_server_connects_to_no_address_that_comes_by_message(
    silent: socket.socket, roots: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_SAVE_ROOTS", raising=False)
    place = f"webhdfs://{address(silent)}/model"
    with in_process(1) as fleet:
        fleet.servers[0].state.saves.roots = roots_of(roots)
        client = fleet.client()
        client.create_table(SPEC)
        with pytest.raises(CheckpointError, match=naming(place)):
            client.save(place, "save-000001", True, WAIT)
    assert not asked(silent, 0.05)


@pytest.mark.parametrize("root", ["webhdfs://", "s3:///models", "hdfs://"])
def test_a_root_that_names_no_host_is_an_error_at_the_start(root: str) -> None:
    with pytest.raises(RoleError, match=naming(root)):
        roots_of(["/data", root])


def test_others_are_served_while_a_store_does_not_answer_and_the_save_fails_in_the_end(
    silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("requests")  # which fsspec's webhdfs uses
    monkeypatch.setattr(save_writer, "MAX_SILENCE", 5.0)
    place, ends = f"webhdfs://{address(silent)}/model", []
    with in_threads(["tcp://127.0.0.1:*"]) as fleet:
        fleet.servers[0].server.state.saves.roots = roots_of([f"webhdfs://{address(silent)}"])
        client, other = fleet.client(), fleet.client()
        for each in (client, other):
            each.create_table(SPEC)

        def save() -> None:
            with pytest.raises(CheckpointError, match=naming(place)):
                client.save(place, "save-000001", True, WAIT)
            ends.append(time.monotonic())

        thread = threading.Thread(target=save)
        thread.start()
        assert asked(silent, WAIT)
        num_pulls = 0
        while not ends:
            other.pull("rows", np.arange(3)).result()
            num_pulls += 1
        thread.join(WAIT)
        assert num_pulls > 1
        assert other.inspect("rows")[0] is not None


def test_a_writer_that_waits_for_files_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(save_writer.time, "monotonic", lambda: now[0])
    silence = save_writer.Silence("there")
    now[0] = save_writer.MAX_SILENCE
    silence.check()
    now[0] += 1
    with pytest.raises(CheckpointError, match="there"):
        silence.check()
    silence.end()
    silence.check()
