"""Waits of workers for each other: none waits for one that is lost, in a circle, or longer than was agreed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.cases import each_of
from support.fleets import Talk, assert_ok, push_arrays, refusal
from support.messages import names

from torchfleet.ps.net.wire import SYNC, Command, Reply, decode_reply, pack, unpack
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

ROWS = TableSpec("rows", dim=1, rule=Rule("sgd", lr=1.0))
TIMEOUT, SYNC_TIMEOUT = 5.0, 50.0


class Meeting:
    """A server and the workers of a job, each of which has joined; time goes on as the test says."""

    def __init__(self, num_workers: int, joined: int | None = None) -> None:
        self.server = Server(1 << 20, num_workers)
        self.workers = [Talk(self.server, client=10 + worker, worker=worker) for worker in range(num_workers)]
        self.workers[0].create(ROWS)
        self.num_workers, self.start = num_workers, time.monotonic()
        self.server.state.now = lambda: self.start  # requests arrive at the test's time, however slow the machine is
        for worker in self.workers[:joined]:
            assert_ok(self.join(worker))

    def join(self, worker: Talk, **fields: Any) -> Reply:
        base = {"host": "here", "pid": 100 + worker.worker, "num_workers": self.num_workers}
        return worker.ask(Command.JOIN, pack({**base, "timeout": TIMEOUT, "sync_timeout": SYNC_TIMEOUT, **fields}))

    def push(self, worker: int) -> list[Reply]:
        talk = self.workers[worker]
        return talk.send(talk.message(Command.PUSH, *push_arrays(ROWS, [1], [[1]]), once=True, flags=SYNC))

    def barrier(self, worker: int, name: str = "b") -> list[Reply]:
        body = {"name": name, "num_workers": self.num_workers, "timeout": 600.0}
        talk = self.workers[worker]
        return talk.send(talk.message(Command.BARRIER, pack(body), once=True))

    def gather(self, worker: int) -> list[Reply]:
        body = {"name": "metrics", "round": 1, "num_workers": self.num_workers, "timeout": 600.0}
        talk = self.workers[worker]
        return talk.send(talk.message(Command.GATHER, pack(body), pack([])))

    def later(self, seconds: float, silent: tuple[int, ...] = ()) -> list[tuple[int, str, str]]:
        """(worker, kind, text) of those who are told something until then; all but `silent` give signs of life."""
        told, now = [], 0.0
        while now < seconds:
            now += 0.5
            for worker in self.workers:
                member = self.server.state.meetings.presence._members.get(worker.worker)
                if member is not None and worker.worker not in silent:
                    member.heard = self.start + now
            replies = [decode_reply(frames) for _, frames in self.server.tick(self.start + now)]
            told += [(reply.worker, *refusal(reply)) for reply in replies]
        return told


@pytest.mark.parametrize("wait", ["push", "barrier", "gather"])
def test_those_who_wait_for_a_silent_worker_are_told_its_name(wait: str) -> None:
    meeting = Meeting(3)
    assert getattr(meeting, wait)(0) == []
    assert getattr(meeting, wait)(2) == []
    assert meeting.later(TIMEOUT - 1, silent=(1,)) == []
    told = meeting.later(2 * TIMEOUT, silent=(1,))
    assert sorted(worker for worker, _, _ in told) == [0, 2]
    assert {kind for _, kind, _ in told} == {"WorkerMissing"}
    assert all(names(text, "worker 1", "pid 101") for _, _, text in told)


def test_a_silent_worker_for_which_nobody_waits_disturbs_nobody() -> None:
    meeting = Meeting(2)
    assert meeting.later(3 * TIMEOUT, silent=(0, 1)) == []
    assert not meeting.server.is_stopping


def test_a_silent_worker_whose_push_is_here_already_is_not_waited_for() -> None:
    meeting = Meeting(2)
    assert meeting.push(1) == []
    assert meeting.later(2 * TIMEOUT, silent=(1,)) == []
    assert len(meeting.push(0)) == 2


def test_a_step_ends_at_the_sync_timeout_with_the_names_of_those_who_live_but_do_not_come() -> None:
    meeting = Meeting(3)
    assert meeting.push(2) == []
    assert meeting.later(SYNC_TIMEOUT - 1) == []
    ((worker, kind, text),) = meeting.later(SYNC_TIMEOUT + 1)
    assert (worker, kind) == (2, "WorkerMissing")
    assert names(text, "worker 0", 1, 3)


@pytest.mark.parametrize("elsewhere", ["barrier", "gather"])
def test_workers_that_wait_for_each_other_in_two_places_are_told_at_once(elsewhere: str) -> None:
    meeting = Meeting(2)
    assert getattr(meeting, elsewhere)(1) == []
    assert meeting.later(1.0) == []
    assert meeting.push(0) == []
    told = meeting.later(0.5)
    assert sorted(worker for worker, _, _ in told) == [0, 1]
    assert all(names(text, "worker 0", "optimizer.step()", "worker 1", elsewhere) for _, _, text in told)
    assert meeting.push(0) == []  # the server is well, and takes the next step
    assert len(meeting.push(1)) == 2


def test_two_barriers_at_once_are_a_circle_too() -> None:
    meeting = Meeting(2, joined=0)
    assert meeting.barrier(0, "epoch") == []
    assert meeting.barrier(1, "end") == []
    assert [worker for worker, _, _ in meeting.later(0.5)] == [0, 1]


def test_nobody_waits_in_a_circle_while_one_worker_is_busy_or_has_left() -> None:
    meeting = Meeting(3)
    assert meeting.push(0) == []
    assert meeting.barrier(1) == []
    assert meeting.later(1.0) == []
    assert_ok(meeting.workers[2].ask(Command.LEAVE))
    assert len(meeting.later(0.5)) == 2


@pytest.mark.parametrize(("worker", "num_workers"), [(0, 2), (1, 2), (0, 1)])
def test_a_worker_of_another_number_of_workers_is_refused(worker: int, num_workers: int) -> None:
    meeting = Meeting(3 - num_workers, joined=0)
    talk = Talk(meeting.server, client=99, worker=worker)
    kind, text = refusal(meeting.join(talk, num_workers=num_workers))
    assert kind == "RoleError"
    assert names(text, f"worker {worker}", num_workers, 3 - num_workers)
    assert names(text, "FLEET_NUM_WORKERS", "PADDLE_TRAINERS_NUM")


def test_a_server_that_was_told_no_number_takes_workers_of_any() -> None:
    meeting = Meeting(1, joined=0)
    meeting.server.state.num_workers = 0
    assert_ok(meeting.join(Talk(meeting.server, client=99, worker=5), num_workers=6))


@each_of("field", ["timeout", "sync_timeout"])
@each_of("value", [0.0, -1.0, 1e9, float("nan")])
def test_time_outs_out_of_range_are_refused(field: str, value: float) -> None:
    meeting = Meeting(1, joined=0)
    assert refusal(meeting.join(meeting.workers[0], **{field: value}))[0] == "WireError"


def test_the_workers_that_joined_are_in_the_statistics() -> None:
    meeting = Meeting(2)
    found = unpack(meeting.workers[0].ask(Command.STATS).arrays[0], dict)["workers"]
    assert [(line["worker"], line["place"]) for line in found] == [(0, "here, pid 100"), (1, "here, pid 101")]


def test_while_a_server_loads_it_says_so_and_nothing_reaches_its_tables() -> None:
    meeting = Meeting(1)
    meeting.server.loading = "it is loading model"
    talk = meeting.workers[0]
    assert unpack(talk.ask(Command.PING).arrays[0], dict) == {"loading": "it is loading model"}
    kind, text = refusal(talk.ask(Command.PULL, *push_arrays(ROWS, [1], [[1]])[1:2]))
    assert kind == "ServerLoading"
    assert "it is loading model" in text
    meeting.server.loading = ""
    assert talk.ask(Command.PING).arrays == []
    assert meeting.server.state.tables[ROWS.number].num_rows == 0
