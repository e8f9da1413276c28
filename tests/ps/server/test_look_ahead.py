"""Pulls that wait in the queue: their rows are read before they are handled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from torchfleet.ps.net.sockets import Listener, SocketChannel
from torchfleet.ps.net.wire import NO_CREATE, Array, Command, Message, decode_reply, encode
from torchfleet.ps.server.look_ahead import LookAhead
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.tiered_table import TieredTable
from torchfleet.ps.tables.tiers import tiers

PLAIN = TableSpec("t", dim=4, rule=Rule(lr=0.1), initializer=Initializer("normal", 0.0, 1.0))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server whose only table has 2,000 rows in memory, and 18,000 on disk."""
    made = Server()
    made.state.add_table(msgspec.structs.replace(PLAIN, storage=TierStorage(64 << 20, str(tmp_path))))
    table = made.state.tables[PLAIN.number]
    assert isinstance(table, TieredTable)
    monkeypatch.setattr(tiers.Tiers, "max_hot", property(lambda _: 2000))
    monkeypatch.setattr(tiers, "SWEEP", 64)
    for start in range(0, 20_000, 1000):
        table.pull(np.arange(start, start + 1000, dtype=np.uint64))
    cold = table.tiers.cold
    cold._end_writes(len(cold._unwritten) - 1)  # but of the open block: rows are in memory while they are written
    return made


def pull_of(keys: np.ndarray, call: int = 1) -> list:
    return encode(Message(Command.PULL, flags=NO_CREATE, call=call, arrays=[Array(PLAIN.number, keys)]))


def pages_ahead(server: Server) -> int:
    table = server.state.tables[PLAIN.number]
    assert isinstance(table, TieredTable)
    return sum(request.num_pages for request in table.tiers.cold._ahead._requests if request is not None)


def test_only_tables_with_rows_on_disk_look_ahead(server: Server) -> None:
    assert LookAhead(server.state).is_on
    other = Server()
    ahead = LookAhead(other.state)
    assert not ahead.is_on
    other.state.add_table(PLAIN)
    assert not ahead.is_on


def test_a_pull_is_foreseen_and_anything_else_is_ignored(server: Server) -> None:
    ahead = LookAhead(server.state)
    for frames in ([b""], [b"garbage"], encode(Message(Command.PING)), pull_of(np.zeros((2, 2), np.float32))):
        ahead.note(frames)
    assert pages_ahead(server) == 0
    ahead.note(pull_of(np.arange(500, dtype=np.uint64)))
    assert pages_ahead(server) > 0


def test_pulls_behind_each_other_have_their_answers_in_order(server: Server) -> None:
    listener = Listener("tcp://127.0.0.1:0")
    channel = SocketChannel(listener.endpoint)
    listener.look_ahead = LookAhead(server.state)
    keys = [np.arange(start, start + 300, dtype=np.uint64) for start in range(0, 6000, 300)]
    expected = [server.state.tables[PLAIN.number].pull(some, False, None) for some in keys]
    replies: list = []
    try:
        for number, some in enumerate(keys, 1):
            assert channel.send(pull_of(some, number))

        def is_over() -> bool:
            while (frames := channel.receive(0.0)) is not None:
                replies.append(decode_reply(frames))
            return len(replies) == len(keys)

        listener.serve(server, is_over)
        assert [reply.call for reply in replies] == list(range(1, len(keys) + 1))
        for reply, values in zip(replies, expected, strict=True):
            assert np.array_equal(reply.arrays[0].data, values)
        assert pages_ahead(server) > 0
    finally:
        channel.close()
        listener.close()
