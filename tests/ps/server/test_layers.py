"""The layers that a request passes: which are there, in which order, and that a server without one has none."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.fleets import Talk, keys_of, push_arrays, refusal
from support.logged_work import MemorySink

from torchfleet.base.errors import ServerBusy
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import ERROR, Command, Message, decode_reply, encode
from torchfleet.ps.server import server as server_module
from torchfleet.ps.server.layers import Loading, Result, Run, composed
from torchfleet.ps.server.log.journal import Journal
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.server_tracing import TracedRequests
from torchfleet.ps.server.sliced_pull import WHOLE
from torchfleet.ps.server.state.work_queue import LongPulls
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))


@pytest.fixture
def talk() -> Talk:
    talk = Talk(Server(1 << 26))
    talk.create(ROWS)
    return talk


def kinds(server: Server) -> list[type]:
    return [type(layer) for layer in server.layers]


class Named:
    """Notes when a request passes it."""

    def __init__(self, name: str, passed: list[str]) -> None:
        self._name, self._passed = name, passed

    def around(self, inner: Run, request: Request) -> Result:
        self._passed.append(f"into {self._name}")
        result = inner(request)
        self._passed.append(f"out of {self._name}")
        return result


def test_the_first_layer_is_the_outermost_and_without_one_nothing_is_added() -> None:
    passed: list[str] = []

    def run(request: Request) -> Result:
        passed.append("command")
        return []

    request = Request(Message(Command.PING), None)
    assert composed([], run) is run
    assert composed([Named("a", passed), Named("b", passed)], run)(request) == []
    assert passed == ["into a", "into b", "command", "out of b", "out of a"]


def test_each_is_there_as_long_as_it_is_on(talk: Talk) -> None:
    server = talk.server
    assert kinds(server) == []
    server.loading = "it reads"
    assert kinds(server) == [Loading]
    assert refusal(talk.ask(Command.STATS))[0] == "ServerLoading"
    server.loading = ""
    assert kinds(server) == []
    assert talk.send(talk.message(Command.PULL, keys_of(ROWS, np.zeros(WHOLE + 1, np.uint64)))) == []
    assert kinds(server) == [LongPulls]
    while server.work():
        pass
    assert len(server.ready()) == 1
    assert kinds(server) == []
    traced = talk.message(Command.PING)
    traced.trace = 7
    (reply,) = talk.send(traced)
    assert 0 < reply.taken <= reply.answered
    assert kinds(server) == [TracedRequests]
    (untraced,) = talk.send(talk.message(Command.PING))
    assert (untraced.taken, untraced.answered) == (0, 0)


def test_their_order_is_that_of_the_list(talk: Talk) -> None:
    server = talk.server
    logged = LoggedServer(server, [MemorySink()])
    traced = talk.message(Command.PING)
    traced.trace = 7
    talk.send(traced)
    talk.send(talk.message(Command.PULL, keys_of(ROWS, np.zeros(WHOLE + 1, np.uint64))))
    server.loading = "it reads"
    assert kinds(server) == [TracedRequests, Loading, LongPulls, Journal]
    logged.close()
    assert kinds(server) == [TracedRequests, Loading, LongPulls]


def called_between(server: Server, talk: Talk, message: Message) -> list[str]:
    """Functions of the package that are running when the command begins, from Server.handle on."""
    found: list[str] = []
    command = server_module.COMMANDS[message.command].run.__code__

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is command and not found:
            above: FrameType | None = frame
            while above is not None and above.f_code is not Server.handle.__code__:
                found.insert(0, above.f_code.co_name)
                above = above.f_back

    sys.setprofile(note)
    try:
        talk.send(message)
    finally:
        sys.setprofile(None)
    return found


def test_a_plain_server_has_nothing_between_a_request_and_its_command_but_who_may_ask_and_once(talk: Talk) -> None:
    pull = talk.message(Command.PULL, keys_of(ROWS, [1]))
    assert called_between(talk.server, talk, pull) == ["answer", "_finish", "_execute", "pull"]
    push = talk.message(Command.PUSH, *push_arrays(ROWS, [1], [[1, 1]]), once=True)
    assert called_between(talk.server, talk, push) == ["answer", "_finish", "_execute", "_run_once", "push"]


class Unsettled:
    """As a table that has put off some slices of work."""

    spec = ROWS

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices

    def settle(self) -> bool:
        self.num_slices = max(0, self.num_slices - 1)
        return self.num_slices > 0


def test_tables_do_what_they_put_off_one_slice_of_one_of_them_at_a_time() -> None:
    server = Server()
    tables: list[Any] = [Unsettled(3), Unsettled(2)]
    server.state.tables = dict(enumerate(tables))
    done = []
    while server.rest():
        done.append([table.num_slices for table in tables])
    assert done == [[2, 2], [1, 2], [0, 1]]
    assert [table.num_slices for table in tables] == [0, 0]


def test_a_refusal_by_the_transport_is_counted_and_names_the_request(talk: Talk) -> None:
    server, message = talk.server, talk.message(Command.PING)
    before = server.state.counters.num_requests
    reply = decode_reply(server.refusals.of_request(encode(message), ServerBusy("too much")))
    assert (reply.status, reply.command, reply.call) == (ERROR, Command.PING, message.call)
    assert reply.incarnation == server.incarnation
    assert refusal(reply)[0] == "ServerBusy"
    assert (server.refusals.num, server.state.counters.num_requests) == (1, before + 1)
