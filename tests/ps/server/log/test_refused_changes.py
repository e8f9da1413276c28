"""Requests that are refused, or cannot be applied: a server that applies the entries is the same as the one that made
them, also then."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.fleets import Talk, push_arrays, refusal
from support.logged_work import SPECS, MemorySink, make_server, whole_state

from torchfleet.ps.net.wire import BOUNDED, GATHERED, OK, Array, Command, Message, Role, decode_reply, encode, pack
from torchfleet.ps.server.log import held_replies, state_copy
from torchfleet.ps.server.log.log_entry import Kind, decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.long_work import MAX_QUEUED_OF_ONE
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state.sessions import MAX_AHEAD

ROWS = next(spec for spec in SPECS if spec.name == "narrow")
HUGE = 3e38  # the next number twice as large is infinite


class Logged:
    """A server with a sink in memory, and peers that talk to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server, self.sink = make_server(), MemorySink()
        self.handler = LoggedServer(self.server, [self.sink], clock=lambda: self.now)
        self.handler.copy_to(self.sink.append, lambda: True)
        while self.handler.is_copying:
            self.handler.work()
        self.peers = [Talk(self.server, 100 + worker, Role.FIRST_WORKER, worker) for worker in range(2)]
        for spec in SPECS:
            self.ask(0, Command.CREATE_TABLE, pack(spec))

    def send(self, message: Message) -> list[Any]:
        return [decode_reply(frames) for _, frames in self.handler.handle(b"p", encode(message), None)]

    def ask(self, worker: int, command: int, *arrays: Array, **fields: Any) -> list[Any]:
        return self.send(self.peers[worker].message(command, *arrays, **fields))

    def check_replay(self, with_tracking: bool = True) -> Server:
        """The server that applies all entries is the same."""
        replay = Replay(make_server())
        for frames in self.sink.entries:
            replay.apply(decode_entry(frames))
        replay.finish()
        assert replay.index == self.handler.index
        assert whole_state(replay.server, with_tracking) == whole_state(self.server, with_tracking)
        return replay.server


@pytest.fixture
def logged() -> Logged:
    return Logged()


@pytest.mark.parametrize("ahead", [MAX_AHEAD, 10**9])
def test_a_number_that_is_too_far_ahead_does_not_end_the_log(logged: Logged, ahead: int) -> None:
    push = push_arrays(ROWS, [1], np.ones((1, ROWS.dim)))
    assert logged.ask(0, Command.PUSH, *push, once=True)[0].status == OK
    (reply,) = logged.ask(0, Command.PUSH, *push, sequence=2 + ahead, floor=2)
    assert refusal(reply)[0] == "WireError"
    assert logged.ask(0, Command.PUSH, *push, once=True)[0].status == OK
    assert logged.check_replay().state.tables[ROWS.number].step == 2


def gathered(samples: float) -> list[Array]:
    """A push that can be applied by itself; two of them, with other numbers of samples, cannot."""
    arrays = push_arrays(ROWS, [1], np.full((1, ROWS.dim), HUGE))
    rates = np.array([[1e-30, np.nan, samples]])
    return [Array(0, rates), *arrays[1:], Array(0, np.array([2, 4], np.uint64))]


def test_gathered_pushes_that_cannot_be_applied_together_are_dropped_where_entries_are_applied_too(
    logged: Logged,
) -> None:
    assert logged.ask(0, Command.PUSH, *gathered(1.0), once=True, flags=GATHERED)[0].status == OK
    (reply,) = logged.ask(1, Command.PUSH, *gathered(1e15), once=True, flags=GATHERED)
    assert refusal(reply)[0] == "TableError"
    assert logged.server.state.pushes.gathered == []
    logged.check_replay()
    assert logged.ask(0, Command.PUSH, *gathered(1.0), once=True, flags=GATHERED)[0].status == OK
    assert len(logged.check_replay().state.pushes.gathered) == 1


@pytest.mark.parametrize("how", ["leave", "save"])
def test_gathered_pushes_that_cannot_be_applied_do_not_divide_servers_at_a_save_or_an_end(
    logged: Logged, how: str, tmp_path: Any
) -> None:
    for worker, samples in enumerate((1.0, 1e15)):
        arrays = gathered(samples)
        arrays[-1] = Array(0, np.array([3, 4], np.uint64))
        assert logged.ask(worker, Command.PUSH, *arrays, once=True, flags=GATHERED)[0].status == OK
    if how == "leave":
        logged.peers[0].role = Role.LAUNCHER
        assert logged.ask(0, Command.LEAVE)[0].status == OK
    else:
        body = {"dirname": str(tmp_path), "folder": "save-1", "with_state": True, "token": 5}
        assert refusal(logged.ask(0, Command.SAVE, pack(body))[0])[0] == "TableError"
    assert logged.server.state.pushes.gathered == []
    logged.check_replay()


def fill_queue(logged: Logged) -> None:
    for token in range(MAX_QUEUED_OF_ONE):
        body = {"table": "aged", "policy": {}, "token": 100 + token}
        assert logged.ask(0, Command.SHRINK, pack(body)) == []


def test_a_clock_that_is_refused_for_now_is_not_set(logged: Logged) -> None:
    hour = 3600
    assert logged.ask(0, Command.CLOCK, pack({"now": 10 * hour, "token": 1})) == []
    while logged.handler.work() is not None:
        logged.handler.ready()
    fill_queue(logged)
    (reply,) = logged.ask(0, Command.CLOCK, pack({"now": 20 * hour, "token": 2}))
    assert refusal(reply)[0] == "ServerBusy"
    assert logged.server.state.clock.now == 10 * hour
    logged.check_replay()


def test_a_save_that_is_refused_for_now_applies_nothing(logged: Logged, tmp_path: Any) -> None:
    arrays = [*push_arrays(ROWS, [1], np.ones((1, ROWS.dim))), Array(0, np.array([3, 4], np.uint64))]
    assert logged.ask(0, Command.PUSH, *arrays, once=True, flags=GATHERED)[0].status == OK
    fill_queue(logged)
    body = {"dirname": str(tmp_path), "folder": "save-1", "with_state": True, "token": 5}
    assert refusal(logged.ask(0, Command.SAVE, pack(body))[0])[0] == "ServerBusy"
    assert len(logged.server.state.pushes.gathered) == 1
    logged.check_replay()


def files(logged: Logged, worker: int, **fields: Any) -> Any:
    body = {"name": "files", "number": 0, "lease": 10.0, **fields}
    (reply,) = logged.ask(worker, Command.FILES, pack(body))
    return reply


def test_a_refused_question_for_files_ends_no_lease(logged: Logged) -> None:
    """Leases that end in another order leave the files in another order, and so the next one to another worker."""
    names = ["a", "b", "c"]
    for worker, lease in ((0, 9.0), (1, 5.0)):
        assert files(logged, worker, files=names, lease=lease).status == OK
        assert files(logged, worker, take=1, lease=lease).status == OK
    logged.now = 6.0
    assert refusal(files(logged, 0, number=7, take=1))[0] == "DataError"
    logged.now = 12.0
    logged.peers[0].client = logged.peers[0].incarnation = 999
    assert files(logged, 0, take=1).status == OK
    logged.check_replay()


def test_a_late_copy_of_a_pull_holds_up_no_other_push(logged: Logged) -> None:
    """Its worker has pushed, and rests: no entry is made of a copy, so that it must change nothing."""
    key = Array(ROWS.number, np.array([1], np.uint64))
    pull = logged.peers[0].message(Command.PULL, key, flags=BOUNDED, once=True)
    assert logged.send(pull)[0].status == OK
    nothing = [Array(0, np.empty((0, 1))), Array(0, np.array([2], np.uint64))]
    assert logged.ask(0, Command.PUSH, *nothing, once=True, flags=BOUNDED, floor=1)[0].status == OK
    assert logged.send(pull)[0].status == OK
    assert logged.server.state.pushes.bound.slow() == []
    logged.check_replay()


def test_a_large_state_is_copied_in_parts(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "MAX_PART", 100)
    logged.ask(0, Command.PUSH, *push_arrays(ROWS, [1, 2], np.ones((2, ROWS.dim))), once=True)
    logged.sink = MemorySink()
    logged.handler.add_sink(logged.sink)
    num = 0
    for _ in range(2):  # who has the first copy passes over the second
        logged.handler.copy_to(logged.sink.append, lambda: True)
        while logged.handler.is_copying:
            num += 1
            logged.ask(0, Command.PUSH, *push_arrays(ROWS, range(num), np.ones((num, ROWS.dim))), once=True)
            logged.handler.work()
    pieces = [decode_entry(frames) for frames in logged.sink.entries]
    sizes = [sum(map(len, piece.frames[1:])) for piece in pieces if piece.kind == Kind.PIECE]
    assert max(sizes) <= 100
    logged.check_replay(with_tracking=False)


def test_replies_that_wait_are_bounded_for_each_client(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_replies, "MAX_REPLIES", 10)
    logged.sink.held_at = logged.sink.last
    push = push_arrays(ROWS, [1], np.ones((1, ROWS.dim)))
    assert logged.ask(0, Command.PUSH, *push, once=True) == []
    for _ in range(100):
        assert logged.ask(0, Command.PING) == []
    other = logged.peers[1].message(Command.PING)
    assert logged.handler.handle(b"other", encode(other), None) == []
    logged.sink.held_at = 0
    replies = logged.handler.tick(time.monotonic())
    assert sorted(peer for peer, _ in replies) == [b"other"] + [b"p"] * 10  # type: ignore[type-var]
