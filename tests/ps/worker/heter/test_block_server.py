"""A heter worker and messages that it did not expect: repeated, forged, cut or damaged. It answers, and goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.heters import CPU, HeterThread, remote
from torch import nn

import torchfleet as fleet
from torchfleet.ps.net.keys import KeyFolder, keygen
from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import ERROR, OK, Array, Command, Message, Reply, Role, decode_reply, encode, pack, unpack
from torchfleet.ps.worker.heter import block_server
from torchfleet.ps.worker.heter.block_runner import BlockRunner
from torchfleet.ps.worker.heter.block_server import BlockServer
from torchfleet.ps.worker.heter.blocks import blocks_of
from torchfleet.ps.worker.heter.messages import Backward, Forward, Forwarded, Join, Load, TensorSpec
from torchfleet.ps.worker.heter.tensors import from_array, to_array

WEIGHT, BIAS, INPUT = torch.full((2, 3), 0.5), torch.ones(2), torch.ones(4, 3)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), fleet.device_guard("gpu")(nn.Linear(3, 2)))


@pytest.fixture
def server() -> Iterator[BlockServer]:
    made = BlockServer(BlockRunner(blocks_of(make()), CPU), num_workers=2)
    yield made
    made.close()


class Caller:
    """A worker that writes its messages by hand."""

    def __init__(self, server: BlockServer, worker: int = 0, client: int = 7) -> None:
        self.server, self.worker, self.client, self.call = server, worker, client, 0

    def message(self, command: int, arrays: list[Array], **fields: Any) -> Message:
        self.call += 1
        given = {
            "role": Role.WORKER,
            "worker": self.worker,
            "client": self.client,
            "call": self.call,
            "incarnation": self.client,
            **fields,
        }
        return Message(command, arrays=arrays, **given)

    def send(self, message: Message, peer: object = "peer") -> list[tuple[object, Reply]]:
        """The replies that are ready when the request has been computed."""
        replies = self.server.handle(peer, encode(message), None)
        deadline = time.monotonic() + 60
        while not replies and time.monotonic() < deadline:
            replies = self.server.ready() if self.server.work() else []
        return [(to, decode_reply(frames)) for to, frames in replies]

    def ask(self, command: int, arrays: list[Array], **fields: Any) -> Reply:
        ((_, reply),) = self.send(self.message(command, arrays, **fields))
        return reply

    def join(self) -> Reply:
        return self.ask(Command.JOIN, [pack(Join(self.server._runner.specs, 1 << 62))])


def forward(**changes: Any) -> list[Array]:
    body = Forward(0, 1, [TensorSpec("float32", (4, 3))], [], [0, 1], [0, 1, 2], [True], 3, "", [])
    return [pack(msgspec.structs.replace(body, **changes)), *map(to_array, (INPUT, WEIGHT, BIAS))]


def kind_of(reply: Reply) -> str:
    assert reply.status == ERROR
    return str(unpack(reply.arrays[0], dict)["kind"])


@pytest.fixture
def caller(server: BlockServer) -> Caller:
    made = Caller(server)
    assert made.join().status == OK
    return made


def test_a_repeated_request_is_computed_once_and_answered_where_it_came_from_last(caller: Caller) -> None:
    caller.server.handle("first", encode(message := caller.message(Command.FORWARD, forward())), None)
    ((peer, reply), *_) = caller.send(message, "second")
    assert (peer, reply.status) == ("second", OK)
    assert unpack(reply.arrays[0], Forwarded).outputs == [TensorSpec("float32", (4, 2))]
    ((peer, again),) = caller.send(message, "third")
    assert peer == "third"
    assert bytes(again.arrays[1].data) == bytes(reply.arrays[1].data)
    assert caller.server.num_computed == 1


def test_pings_are_answered_while_a_block_computes(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compute = threading.Event(), caller.server._runner.forward
    monkeypatch.setattr(caller.server._runner, "forward", lambda *args: gate.wait(60) and compute(*args))
    assert caller.server.handle("peer", encode(caller.message(Command.FORWARD, forward())), None) == []
    assert caller.ask(Command.PING, []).status == OK
    assert kind_of(caller.ask(Command.FORWARD, forward(number=2))) == "ServerBusy"
    gate.set()


GRADS = [TensorSpec("float32", (4, 2))]
WRONG_FORWARDS: dict[str, list[Array]] = {
    "block": forward(block=9),
    "no body": [],
    "body of floats": [Array(0, np.ones(3, np.float32)), *forward()[1:]],
    "body of something else": [pack({"a": 1}), *forward()[1:]],
    "no arrays": forward()[:1],
    "one array more": [*forward(), to_array(BIAS)],
    "dtype": forward(inputs=[TensorSpec("complex64", (4, 3))]),
    "shape": forward(inputs=[TensorSpec("float32", (4, 4))]),
    "huge shape": forward(inputs=[TensorSpec("float32", (1 << 30, 1 << 30, 0))]),
    "values": forward(changed=[0, 7]),
    "wanted": forward(wanted=[0, 9]),
    "wanted twice": forward(wanted=[1, 1]),
    "keywords": forward(keywords=["a", "b"]),
    "training": forward(training=[]),
    "autocast": forward(autocast="float7"),
    "negative": forward(seed=-1),
    "too many kept": forward(kept=list(range(65))),
}


@pytest.mark.parametrize("arrays", WRONG_FORWARDS.values(), ids=WRONG_FORWARDS.keys())
def test_a_damaged_forward_is_refused_and_the_next_one_computed(caller: Caller, arrays: list[Array]) -> None:
    assert kind_of(caller.ask(Command.FORWARD, arrays)) == "WireError"
    assert caller.ask(Command.FORWARD, forward(number=2)).status == OK


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (Backward(99, [0], GRADS), "SessionLost"),
        (Backward(1, [5], GRADS), "WireError"),
        (Backward(1, [0, 0], GRADS), "WireError"),
        (Backward(1, [0], [TensorSpec("float32", (2, 4))]), "WireError"),
    ],
)
def test_a_damaged_backward_is_refused(caller: Caller, body: Backward, kind: str) -> None:
    assert caller.ask(Command.FORWARD, forward()).status == OK
    grads = to_array(torch.ones(4, 2))
    assert kind_of(caller.ask(Command.BACKWARD, [pack(body), grads])) == kind
    assert caller.ask(Command.BACKWARD, [pack(Backward(1, [0], GRADS)), grads]).status == OK


def test_requests_of_other_roles_workers_and_sessions_are_refused(caller: Caller) -> None:
    for fields, kind in [
        ({"role": Role.SERVER}, "PermissionRefused"),
        ({"role": 77}, "PermissionRefused"),
        ({"worker": 2}, "RoleError"),
        ({"worker": 1}, "SessionLost"),
        ({"client": 8}, "SessionLost"),
        ({"shard": 1}, "WireError"),
    ]:
        assert kind_of(caller.ask(Command.FORWARD, forward(), **fields)) == kind
    assert kind_of(caller.ask(Command.PULL, [])) == "WireError"
    assert kind_of(caller.ask(200, [])) == "WireError"
    assert caller.ask(Command.FORWARD, forward()).status == OK


@pytest.mark.parametrize("frames", [[], [b""], [b"x" * 100], [b"TFLT" + bytes(100)]])
def test_frames_that_are_no_message_are_answered(server: BlockServer, frames: list[bytes]) -> None:
    ((_, reply),) = server.handle("peer", frames, None)
    assert kind_of(decode_reply(reply)) == "WireError"


def test_values_that_have_not_come_are_asked_for(caller: Caller) -> None:
    arrays = forward(changed=[0])[:3]
    assert kind_of(caller.ask(Command.FORWARD, arrays)) == "SessionLost"


def test_sessions_are_limited_and_forgotten(server: BlockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "MAX_SESSIONS", 2)
    callers = [Caller(server, client=i) for i in range(3)]
    assert [caller.join().status for caller in callers] == [OK, OK, ERROR]
    assert callers[0].join().status == OK  # a repeat
    specs = server._runner.specs
    reply = Caller(server, client=9).ask(Command.JOIN, [pack(Join(specs, 1))], incarnation=6)
    assert unpack(reply.arrays[0], Load) == Load(2, is_joined=False)
    assert unpack(callers[0].ask(Command.STATS, []).arrays[0], Load).sessions == 2
    server.tick(time.monotonic() + block_server.IDLE + 1)
    assert server.num_sessions == 0


def test_it_stops_when_all_workers_have_left_and_not_by_the_word_of_another_process(server: BlockServer) -> None:
    first, second = Caller(server, 0, 1), Caller(server, 1, 2)
    first.join()
    second.join()
    first.ask(Command.LEAVE, [], flags=1)
    forged = first.message(Command.LEAVE, [], flags=1, worker=1)
    forged.incarnation = 99
    first.send(forged)
    assert not server.is_stopping
    assert second.ask(Command.FORWARD, forward()).status == OK
    second.ask(Command.LEAVE, [], flags=1)
    assert server.is_stopping


def test_it_stops_when_all_workers_have_left_though_a_request_of_the_last_one_still_computes(
    server: BlockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compute = threading.Event(), server._runner.forward
    monkeypatch.setattr(server._runner, "forward", lambda *args: gate.wait(60) and compute(*args))
    first, second = Caller(server, 0, 1), Caller(server, 1, 2)
    first.join()
    second.join()
    first.ask(Command.LEAVE, [], flags=1)
    assert server.handle("peer", encode(second.message(Command.FORWARD, forward())), None) == []
    assert second.ask(Command.LEAVE, [], flags=1).status == OK
    gate.set()
    deadline = time.monotonic() + 60
    while not server.ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert server.num_computed == 1
    assert server.is_stopping
    assert not server.desertion


def test_it_ends_when_no_worker_is_heard_of() -> None:
    before = time.monotonic()
    server = BlockServer(BlockRunner(blocks_of(make()), CPU), 1, orphan_timeout=10.0)
    server.tick(before + 5)
    assert not server.is_stopping
    server.tick(time.monotonic() + 11)
    assert server.is_stopping
    assert server.desertion
    server.close()


def test_bytes_that_are_no_bools_become_bools() -> None:
    found = from_array(TensorSpec("bool", (3,)), Array(0, np.array([0, 2, 255], np.uint8)), CPU)
    assert found.tolist() == [False, True, True]
    assert found.view(torch.uint8).tolist() == [0, 1, 1]


def test_with_keys_only_workers_are_heard(tmp_path: Path) -> None:
    keygen(tmp_path / "keys")
    keygen(tmp_path / "others")
    keys = KeyFolder(tmp_path / "keys")
    heter = HeterThread(make(), "tcp://127.0.0.1:0", keys=keys)
    try:
        for folder in (None, KeyFolder(tmp_path / "others")):
            stranger = SocketChannel(heter.endpoint, folder)
            stranger.send(encode(Message(Command.PING)))
            assert stranger.receive(0.3) is None
            stranger.close()
        assert heter.server.counters.num_requests == 0
        model = make()
        with remote(model, [heter.endpoint], keys=keys):
            assert model[1](torch.ones(1, 3)).shape == (1, 2)
    finally:
        heter.close()
