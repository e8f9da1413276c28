"""A server with a log is killed, or its machine loses power, after every step that it makes in the log's folder."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crash_points import Crash, CrashPoints
from support.fleets import Talk, push_arrays
from support.logged_work import make_server

from torchfleet.ps.net.wire import Command, Message, Role, decode_reply, encode, pack
from torchfleet.ps.server.log.durable_server import Durability, DurableServer, begin_log, go_on
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec

SPEC = TableSpec("rows", dim=2, rule=Rule(lr=1.0), initializer=Initializer("constant", 0.0))
JOIN = {"host": "h", "pid": 1, "num_workers": 2, "timeout": 20.0, "sync_timeout": 9.0}


@dataclass
class Known:
    """What clients, and those who started the server, know."""

    run: str = "a"
    num_asked: int = 0  # pushes
    num_answered: int = 0
    num_workers: int = 0  # of this run that have asked to join
    is_over: bool = False  # all workers have left

    def copy(self) -> Known:
        return Known(self.run, self.num_asked, self.num_answered, self.num_workers, self.is_over)


class Life:
    """A server with a log in a folder, whose crashes are recorded."""

    def __init__(self, folder: Path, has_power_cuts: bool) -> None:
        self.folder, self.known = folder, Known()
        self.points = CrashPoints(folder, self.known.copy, has_power_cuts)
        self._clients = itertools.count(7)
        self._talk = self._new_talk()

    def start(self, run: str = "a") -> None:
        if run != self.known.run:
            self.known.run, self.known.num_workers, self._talk = run, 0, self._new_talk()
        self.durable = started(self.folder, run)

    def _new_talk(self) -> Talk:
        return Talk(make_server(), next(self._clients), Role.FIRST_WORKER)

    def work(self) -> None:
        self.known.num_workers = 1
        self._ask(self._talk.message(Command.JOIN, pack(JOIN)))
        self._ask(Talk(make_server(), 99).message(Command.CREATE_TABLE, pack(SPEC)))
        for _ in range(2):
            self.known.num_asked += 1
            grads = push_arrays(SPEC, [1, 2], np.ones((2, SPEC.dim)))
            self._ask(self._talk.message(Command.PUSH, *grads, once=True))
            self.known.num_answered += 1

    def cut(self) -> None:
        self.durable._cut()
        self.durable._wait_for_copy()

    def end(self, is_over: bool = False) -> None:
        self.known.is_over |= is_over
        self.durable.close(is_over)

    def _ask(self, message: Message) -> None:
        ready, deadline = self.durable.handle(b"p", encode(message), None), time.monotonic() + 20
        while not ready:
            assert time.monotonic() < deadline
            self.durable.work()
            self.durable.rest()
            ready = self.durable.tick(time.monotonic())
        assert decode_reply(ready[0][1]).status == 0


def started(folder: Path, run: str) -> DurableServer:
    server, durability = make_server(), Durability(folder, 0.0, run)
    return go_on(server, durability, lambda text: None) or begin_log(server, durability)


def lived(folder: Path, has_power_cuts: bool) -> list[Crash]:
    """All crashes of a log that begins, is cut, goes on in the same run and in another, is removed, begins again."""
    life = Life(folder, has_power_cuts)
    with life.points.recording():
        for run in ("a", "a", "b"):
            life.start(run)
            life.work()
            life.cut()
            life.work()
            life.end()
        life.start("b")
        life.end(is_over=True)
        life.start("c")
        life.end()
    return life.points.crashes


@pytest.mark.parametrize("has_power_cuts", [False, True])
def test_a_crash_after_any_step_loses_no_answered_push_and_revives_no_worker(
    tmp_path: Path, has_power_cuts: bool
) -> None:
    crashes = [crash for crash in lived(tmp_path / "log", has_power_cuts) if crash.is_kill is not has_power_cuts]
    assert len(crashes) > 60
    for number, crash in enumerate(crashes):
        folder = tmp_path / str(number)
        crash.put(folder)
        durable = started(folder, crash.note.run)  # never an error
        check(durable, crash)
        durable.close()
        before = num_pushes(durable)
        durable = started(folder, crash.note.run)  # also when it is killed and started again
        assert num_pushes(durable) == before, crash.step
        durable.close()


def check(durable: DurableServer, crash: Crash) -> None:
    known, num = crash.note, num_pushes(durable)
    if known.is_over:
        assert num in (0, known.num_answered), crash.step
    else:
        assert known.num_answered <= num <= known.num_asked, crash.step
    num_workers = len(durable.server.state.meetings.presence.export()["members"])
    assert num_workers <= known.num_workers, crash.step


def num_pushes(durable: DurableServer) -> int:
    """How many pushes are in the rows, by their values."""
    table: Any = durable.server.state.tables.get(SPEC.number)
    if table is None:
        return 0
    rows = table.pull(np.array([1, 2], np.uint64))
    assert np.array_equal(rows, np.full_like(rows, rows[0, 0]))
    return int(-rows[0, 0])
