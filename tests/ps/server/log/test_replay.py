"""A server that applies the entries of another is the same, bit for bit; also one that was filled beside serving."""

from __future__ import annotations

import numpy as np
import pytest
from support import twins
from support.cases import each_of
from support.fleets import push_arrays
from support.logged_work import SPECS, MemorySink, Work, make_server, whole_state

from torchfleet.base.errors import LogError
from torchfleet.ps.net.wire import Array, Command
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.server import Server


def logged(seed: int) -> tuple[Server, LoggedServer, MemorySink, Work]:
    server, sink, now = make_server(), MemorySink(), [0.0]
    handler = LoggedServer(server, [sink], clock=lambda: now[0])
    handler.copy_to(sink.append, lambda: True)
    while handler.is_copying:
        handler.work()
    work = Work(handler, seed)
    handler._clock = lambda: work.now
    return server, handler, sink, work


def replayed(entries: list[list[bytes]]) -> Replay:
    replay = Replay(make_server())
    for frames in entries:
        replay.apply(decode_entry(frames))
    replay.finish()
    return replay


@each_of("seed", range(3))
def test_whoever_applies_the_same_entries_is_the_same_server(seed: int) -> None:
    server, handler, sink, work = logged(seed)
    work.steps(300)
    replay = replayed(sink.entries)
    assert replay.index == handler.index
    assert work.replies > 200
    assert whole_state(replay.server) == whole_state(server)


@pytest.mark.parametrize("name", ["narrow", "wide", "counted"])
def test_keys_that_are_made_to_collide_are_taken_whole_and_replayed(name: str) -> None:
    """A client that knows the secret of a map gets slow rows for its keys, and no error in the middle of a push."""
    server, _, sink, work = logged(3)
    spec = next(spec for spec in SPECS if spec.name == name)
    index = server.state.table(spec.number).index
    keys = [twins.key_with_tag(0xFFFFFFFF, low, twins.secret_of(index)) for low in range(1200)]
    num_rows = server.state.table(spec.number).num_rows
    made = np.array(keys, np.uint64), np.ones((len(keys), spec.dim), np.float32)
    for _ in range(2):
        work._ask(Command.PULL, 0, Array(spec.number, made[0]))
        work._ask(Command.PUSH, 0, *push_arrays(spec, *made), once=True)
    if name != "counted":  # which has a capacity
        assert server.state.table(spec.number).num_rows == num_rows + len(keys)
    work.steps(50)
    assert whole_state(replayed(sink.entries).server) == whole_state(server)


@each_of("seed", range(3))
def test_a_copy_that_is_filled_beside_serving_is_the_same_server(seed: int) -> None:
    server, handler, _, work = logged(seed)
    work.steps(100)
    copy = MemorySink()
    handler.copy_to(copy.append, lambda: work.dice.random() < 0.1)
    handler.add_sink(copy)
    num = 0
    while handler.is_copying:
        work.steps(5)
        num += 5
    work.steps(50)
    assert num > 20  # requests came in between the pieces
    assert whole_state(replayed(copy.entries).server, False) == whole_state(server, False)


def test_a_server_that_takes_over_knows_which_changes_were_made() -> None:
    server, _, sink, work = logged(11)
    work.steps(150)
    replay, other = replayed(sink.entries), MemorySink()
    other.last = replay.index
    work.handler = LoggedServer(replay.server, [other], replay.index, 1, begun=replay.time, clock=lambda: 0.0)
    before = work.replies
    for frames in work._sent[-5:]:
        work._send(frames)
    assert work.replies > before  # they are answered, but for those that wait
    assert replay.server.state.tables.keys() == server.state.tables.keys()
    assert {number: table.step for number, table in replay.server.state.tables.items()} == {
        number: table.step for number, table in server.state.tables.items()
    }


def test_replies_wait_for_every_sink_and_for_all_changes_before_them() -> None:
    _, handler, sink, work = logged(5)
    work.steps(20)
    before = work.replies
    sink.held_at = sink.last
    work._push()
    work._pull()
    assert work.replies == before
    sink.held_at = 0
    work.replies += len(handler.tick(work.now))
    assert work.replies >= before + 2


def test_while_a_sink_takes_nothing_changes_and_reads_are_refused_and_time_stands_still() -> None:
    server, handler, sink, work = logged(5)
    work.steps(20)
    sink.why = "The disk is full."
    before, index = whole_state(server), handler.index
    work._push()
    work.now += 1000.0
    handler.tick(work.now)
    assert server.refusals.num > 0
    assert (whole_state(server), handler.index) == (before, index)
    sink.why = ""
    work._push()
    handler.tick(work.now + 0.1)
    assert handler.index > index
    assert not server.state.meetings.presence.lost(handler.now())  # no worker could be heard in that time


def test_entries_that_do_not_follow_are_refused() -> None:
    _, _, sink, work = logged(3)
    work.steps(20)
    replay = Replay(make_server())
    with pytest.raises(LogError, match="piece"):
        replay.apply(decode_entry(sink.entries[-1]))
    with pytest.raises(LogError, match="entry"):
        replayed([*sink.entries[:20], *sink.entries[21:]])
    with pytest.raises(LogError, match="pieces"):
        replayed(sink.entries[:1])
