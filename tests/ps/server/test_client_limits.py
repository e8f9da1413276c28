"""What one client may do: leave for itself only, act for itself only, and take no more than its share of a server."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.fleets import Fleet, SgdOracle, Talk, assert_ok, keys_of, push_arrays, refusal
from support.messages import names
from test_waiting import ROWS, Meeting

from torchfleet.ps.net.wire import NO_CREATE, SYNC, VERSIONS, Array, Command, Reply, Role, decode_reply, pack, unpack
from torchfleet.ps.server import sliced_pull
from torchfleet.ps.server.long_work import MAX_KEPT, MAX_QUEUED_OF_ONE
from torchfleet.ps.server.meeting import mail
from torchfleet.ps.server.meeting.mail import Mail, SendBody, TakeBody
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.sliced_pull import SLICE, WHOLE
from torchfleet.ps.server.state import budgets, work_queue
from torchfleet.ps.server.state.budgets import MAX_HELD, MAX_WAITING, Budgets
from torchfleet.ps.tables.settings.policy import CountFilterEntry, Shrink
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client import client as client_module

MEGABYTE = 1 << 20
JOIN = {"host": "there", "pid": 1, "num_workers": 2, "timeout": 5.0, "sync_timeout": 50.0}


def stranger(server: Server, worker: int, role: int = Role.WORKER) -> Talk:
    """Another process, with a worker's key."""
    return Talk(server, client=666, role=role, worker=worker)


class TestLeaving:
    def test_nobody_leaves_for_a_worker_that_is_another_process(self) -> None:
        meeting = Meeting(2)
        for worker in range(2):
            for role in (Role.WORKER, Role.FIRST_WORKER):
                kind, text = refusal(stranger(meeting.server, worker, role).ask(Command.LEAVE))
                assert kind == "RoleError"
                assert names(text, "LEAVE", f"worker {worker}")
        assert not meeting.server.is_stopping

    def test_nobody_leaves_for_a_worker_that_has_not_come_yet(self) -> None:
        meeting = Meeting(2, joined=0)
        for worker in range(2):
            assert names(refusal(stranger(meeting.server, worker).ask(Command.LEAVE))[1], f"worker {worker}")
        assert not meeting.server.is_stopping

    def test_who_has_joined_leaves_also_twice_and_a_launcher_leaves_for_it(self) -> None:
        meeting = Meeting(2)
        own = Talk(meeting.server, client=10, role=Role.WORKER, worker=0)
        assert_ok(own.ask(Command.LEAVE))
        assert_ok(own.ask(Command.LEAVE))
        assert not meeting.server.is_stopping
        assert_ok(stranger(meeting.server, 1, Role.LAUNCHER).ask(Command.LEAVE))
        assert meeting.server.is_stopping


class TestTwoProcessesOfOneWorker:
    @pytest.fixture
    def meeting(self) -> Meeting:
        """Worker 1 has pushed, has fallen silent, and another process has taken its place."""
        meeting = Meeting(2)
        for worker in meeting.workers:
            worker.role = Role.WORKER
        assert meeting.push(1) == []
        self.successor = Talk(meeting.server, client=99, role=Role.WORKER, worker=1)
        meeting.server.state.meetings.presence._members[1].heard -= 60
        replies = self.successor.send(self.successor.message(Command.JOIN, pack(JOIN)))
        (told,) = [reply for reply in replies if reply.command == Command.PUSH]
        kind, text = refusal(told)
        assert kind == "WorkerMissing"
        assert "worker 1" in text
        return meeting

    def test_a_push_of_the_first_is_not_taken_for_a_later_step(self, meeting: Meeting) -> None:
        assert meeting.push(0) == [], "the step was made with a push of the process that is gone"
        (late,) = meeting.push(1)
        assert refusal(late)[0] == "RoleError"
        push = push_arrays(ROWS, [1], [[3]])
        replies = self.successor.send(self.successor.message(Command.PUSH, *push, once=True, flags=SYNC))
        assert len(replies) == 2
        assert Talk(meeting.server).pull(ROWS, [1]).tolist() == [[-2]]  # the mean of 1 and 3

    def test_the_first_may_not_act_for_the_worker_any_more(self, meeting: Meeting) -> None:
        old = meeting.workers[1]
        barrier = pack({"name": "b", "num_workers": 2, "timeout": 9.0})
        taken = pack({"topic": "t", "received": 0})
        for command, body in ((Command.BARRIER, barrier), (Command.TAKE, taken)):
            kind, text = refusal(old.ask(command, body, once=command is Command.BARRIER))
            assert kind == "RoleError"
            assert names(text, "worker 1", "pid 1")
        assert refusal(old.ask(Command.LEAVE))[0] == "RoleError"
        assert_ok(old.ask(Command.PING))

    def test_a_worker_that_gives_signs_of_life_is_not_replaced_whatever_its_successor_claims(self) -> None:
        meeting = Meeting(2)
        claims = pack({**JOIN, "restart": 1000})
        kind, text = refusal(stranger(meeting.server, 1).ask(Command.JOIN, claims))
        assert kind == "ServerBusy"
        assert "worker 1" in text
        assert_ok(meeting.join(meeting.workers[1], again=True))


class TestMeetings:
    def test_gathers_of_one_client_are_held_up_to_its_budget(self, server: Server) -> None:
        talk = Talk(server)
        data = Array(0, np.zeros(16 * MEGABYTE, np.uint8))
        kinds = []
        for number in range(60):
            body = pack({"name": f"g{number}", "round": 1, "num_workers": 1 + number % 2, "timeout": 60.0})
            replies = talk.send(talk.message(Command.GATHER, body, data, client=1000 + number))
            kinds += [refusal(reply)[0] for reply in replies if reply.status]
        assert kinds == ["ServerBusy"] * (60 - 7)
        assert server.state.budgets.num_bytes <= MAX_HELD
        other = Talk(server, client=2)
        body = pack({"name": "o", "round": 1, "num_workers": 1, "timeout": 60.0})
        assert_ok(other.ask(Command.GATHER, body, data))

    def test_what_was_held_is_free_when_it_is_answered(self, server: Server) -> None:
        talks = [Talk(server, client=1 + worker, worker=worker) for worker in range(2)]
        body = pack({"name": "b", "num_workers": 2, "timeout": 60.0})
        for _ in range(3):
            assert talks[0].send(talks[0].message(Command.BARRIER, body, once=True)) == []
            assert server.state.budgets.num_bytes
            assert len(talks[1].send(talks[1].message(Command.BARRIER, body, once=True))) == 2
            assert server.state.budgets.num_bytes == 0

    def test_a_name_of_megabytes_is_refused_and_not_kept(self, server: Server) -> None:
        talk = Talk(server)
        for size in (300, 32 * MEGABYTE):
            barrier = pack({"name": "x" * size, "num_workers": 2, "timeout": 60.0})
            assert refusal(talk.ask(Command.BARRIER, barrier, once=True))[0] == "WireError"
            gather = pack({"name": "x" * size, "round": 1, "num_workers": 2, "timeout": 60.0})
            assert refusal(talk.ask(Command.GATHER, gather, pack([])))[0] == "WireError"
        assert server.state.budgets.num_bytes == 0

    def test_a_gather_has_one_array_and_not_more(self, server: Server) -> None:
        body = pack({"name": "g", "round": 1, "num_workers": 2, "timeout": 60.0})
        more = Array(0, np.zeros(MEGABYTE, np.uint8))
        assert names(refusal(Talk(server).ask(Command.GATHER, body, pack([]), more))[1], 2, 3)

    def test_requests_of_one_client_that_wait_are_counted(self, server: Server) -> None:
        talk, other = Talk(server), Talk(server, client=2, worker=1)
        for number in range(MAX_WAITING):
            body = pack({"name": f"b{number}", "num_workers": 2, "timeout": 60.0})
            assert talk.send(talk.message(Command.BARRIER, body, once=True)) == []
        body = pack({"name": "one more", "num_workers": 2, "timeout": 60.0})
        late = talk.message(Command.BARRIER, body, once=True)
        (reply,) = talk.send(late)
        assert refusal(reply)[0] == "ServerBusy"
        assert len(other.send(other.message(Command.BARRIER, pack({"name": "b0", "num_workers": 2, "timeout": 60.0}),
                                            once=True))) == 2  # fmt: skip
        assert talk.send(late) == [], "what was refused for now is taken when there is room"

    def test_parcels_of_one_worker_leave_room_for_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mail, "MAX_BYTES", 1000)
        monkeypatch.setattr(mail, "MAX_BYTES_OF_ONE", 500)
        box = Mail()
        parcel = [Array(0, np.zeros(100, np.uint8))]
        assert [box.send(1, SendBody("t", 2, n), parcel) for n in range(1, 8)] == [True] * 5 + [False] * 2
        assert box.send(3, SendBody("t", 2, 1), parcel)
        assert len(box.take(2, TakeBody("t", 0))) == 6
        box.take(2, TakeBody("t", 6))
        assert box.num_bytes == 0
        assert box.send(1, SendBody("t", 2, 6), parcel)

    def test_topics_of_one_worker_do_not_drop_those_of_others(self) -> None:
        box = Mail()
        assert box.send(0, SendBody("shuffle", 1, 1), [Array(0, np.zeros(9, np.uint8))])
        for number in range(100):
            box.take(5, TakeBody(f"noise {number}", 0))
        assert len(box.take(1, TakeBody("shuffle", 0))) == 1


def test_inspections_of_one_client_are_queued_up_to_a_bound(server: Server) -> None:
    talk, other = Talk(server), Talk(server, client=2)
    talk.create(ROWS)
    asked = [
        talk.send(talk.message(Command.INSPECT, pack({"table": "rows", "top": 1, "token": token})))
        for token in range(1, 101)
    ]
    refused = [reply for replies in asked for reply in replies]
    assert {refusal(reply)[0] for reply in refused} == {"ServerBusy"}
    assert len(server.state.work.slices) == 100 - len(refused) == MAX_QUEUED_OF_ONE
    assert other.send(other.message(Command.INSPECT, pack({"table": "rows", "top": 1, "token": 999}))) == []
    while server.work():
        pass
    assert len(server.tick(time.monotonic())) == MAX_QUEUED_OF_ONE + 1


def test_what_only_reads_pushes_out_no_answer_of_a_shrink() -> None:
    """A repeat of a shrink, whose answer was lost, gets the same answer, whatever was inspected since."""
    server = Server(1 << 20)
    talk = Talk(server)
    spec = TableSpec("rows", dim=1, rule=Rule("sgd", lr=1.0), shrink=Shrink(max_rows=100))
    talk.create(spec)
    talk.pull(spec, range(40))
    shrink = talk.message(
        Command.SHRINK, pack({"table": "rows", "policy": {"max_rows": 10, "max_share": 1.0}, "token": 1})
    )

    def asked(message: Any) -> Reply:
        replies = talk.send(message)
        while not replies:
            server.work()
            replies = [decode_reply(frames) for _, frames in server.tick(time.monotonic())]
        assert_ok(replies[0])
        return replies[0]

    first = unpack(asked(shrink).arrays[0], dict)
    assert first == {"rows": 30}
    for token in range(2, 2 + MAX_KEPT + 1):
        asked(talk.message(Command.INSPECT, pack({"table": "rows", "top": 1, "token": token})))
    assert unpack(asked(shrink).arrays[0], dict) == first
    assert len(server.state.work.requests) <= 2 * MAX_KEPT


class TestLongPulls:
    SPEC = TableSpec("long", dim=2, rule=Rule("sgd", lr=1.0))

    @pytest.fixture
    def talk(self) -> Talk:
        talk = Talk(Server(1 << 26))
        talk.create(self.SPEC)
        assert_ok(talk.push(self.SPEC, np.arange(0, 1000, 2), np.ones((500, 2))))
        return talk

    def finish(self, talk: Talk, others: Talk | None = None) -> list:
        """All replies, one slice after the other; `others` asks in between."""
        replies = []
        while talk.server.work():
            replies += [decode_reply(frames) for _, frames in talk.server.tick(time.monotonic())]
            if others is not None:
                assert len(others.pull(self.SPEC, [1])) == 1
        return replies

    @pytest.mark.parametrize("flags", [VERSIONS, VERSIONS | NO_CREATE])
    def test_it_has_the_rows_of_a_short_one_and_others_are_served_in_between(self, talk: Talk, flags: int) -> None:
        keys = np.random.default_rng(1).integers(0, 2000, WHOLE + 5).astype(np.uint64)
        oracle = SgdOracle(2, 1.0)
        oracle.push(np.arange(0, 1000, 2), np.ones((500, 2), np.float32))
        assert talk.send(talk.message(Command.PULL, keys_of(self.SPEC, keys), flags=flags)) == []
        (reply,) = self.finish(talk, others=Talk(talk.server, client=2))
        assert np.array_equal(reply.arrays[0].data, oracle.pull(keys))
        assert reply.arrays[1].data.tolist() == [[1]]

    def test_what_its_client_asks_after_it_waits_for_it(self, talk: Talk) -> None:
        keys = np.zeros(WHOLE + 1, np.uint64)
        assert talk.send(talk.message(Command.PULL, keys_of(self.SPEC, keys))) == []
        push = push_arrays(self.SPEC, [0], [[5, 5]])
        assert talk.send(talk.message(Command.PUSH, *push, once=True)) == []
        assert talk.send(talk.message(Command.PULL, keys_of(self.SPEC, keys))) == []
        assert talk.send(talk.message(Command.PING)) == []
        pulled, pushed, again, ping = self.finish(talk)
        assert [r.command for r in (pulled, pushed, again, ping)] == [
            Command.PULL,
            Command.PUSH,
            Command.PULL,
            Command.PING,
        ]
        assert (pulled.arrays[0].data == -1).all()
        assert (again.arrays[0].data == -6).all()
        assert talk.server.state.budgets.num_bytes == 0

    def test_no_slice_takes_more_keys_than_a_short_pull(self, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes, table = [], talk.server.state.tables[self.SPEC.number]
        real = table.pull
        monkeypatch.setattr(table, "pull", lambda keys, *rest: (sizes.append(len(keys)), real(keys, *rest))[1])
        talk.send(talk.message(Command.PULL, keys_of(self.SPEC, np.arange(3 * WHOLE))))
        assert sizes == []
        self.finish(talk)
        assert max(sizes) <= SLICE

    def test_a_table_that_counts_appearances_counts_a_key_once(self) -> None:
        talk = Talk(Server(1 << 26))
        spec = TableSpec("counted", dim=1, entry=CountFilterEntry(2))
        talk.create(spec)
        assert not talk.pull(spec, np.zeros(WHOLE + SLICE, np.uint64)).any()
        assert talk.server.state.tables[spec.number].num_rows == 0

    def test_one_that_finds_the_table_full_is_told(self) -> None:
        talk = Talk(Server(1 << 20))
        talk.create(self.SPEC)
        assert talk.send(talk.message(Command.PULL, keys_of(self.SPEC, np.arange(WHOLE * 2)))) == []
        (reply,) = self.finish(talk)
        kind, text = refusal(reply)
        assert kind == "TableError"
        assert f"'{self.SPEC.name}'" in text


def test_a_client_creates_so_many_rows_a_second(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.state, "budgets", Budgets(max_new_rows=1000.0))
    talk, other = Talk(server), Talk(server, client=2)
    talk.create(ROWS)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert len(talk.pull(ROWS, range(5000))) == 5000  # five seconds' worth
    kind, text = refusal(talk.ask(Command.PULL, keys_of(ROWS, [9999])))
    assert kind == "ServerBusy"
    assert names(text, "1,000")
    talk.pull(ROWS, [1], flags=NO_CREATE)
    other.pull(ROWS, [9999])
    now[0] += 5.0 - budgets.BURST + 0.01
    talk.pull(ROWS, range(5000, 5010))
    server.state.budgets.forget_idle(now[0] + 1000)
    assert not server.state.budgets._accounts


@pytest.mark.parametrize(("given", "number"), [("", budgets.DEFAULT_NEW_ROWS), ("0", 0), ("5e5", 500_000)])
def test_the_number_of_new_rows_is_a_setting(monkeypatch: pytest.MonkeyPatch, given: str, number: float) -> None:
    monkeypatch.setenv(budgets.NEW_ROWS, given)
    assert Budgets()._max_new_rows == number


class TestOrphans:
    def test_a_server_ends_when_the_workers_that_were_there_are_silent_for_long(self) -> None:
        meeting = Meeting(3, joined=2)
        meeting.server._orphan_timeout = 30.0
        assert_ok(Talk(meeting.server, client=10, worker=0).ask(Command.LEAVE))
        meeting.later(29.0, silent=(0, 1, 2))
        assert not meeting.server.is_stopping
        meeting.later(32.0, silent=(0, 1, 2))
        assert meeting.server.is_stopping
        assert names(meeting.server.desertion, 30, "orphan_timeout")

    def test_it_waits_for_workers_that_have_never_come_and_for_ever_if_told_so(self) -> None:
        for meeting in (Meeting(2, joined=0), Meeting(3, joined=1)):
            meeting.server._orphan_timeout = 30.0 if not meeting.server.state.meetings.presence._members else 0.0
            meeting.later(40.0, silent=(0, 1, 2))
            assert not meeting.server.is_stopping


def test_new_rows_leave_some_memory_free(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1 << 40]
    monkeypatch.setattr(budgets, "memory_left", lambda: left[0])
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    talk = Talk(server)
    talk.create(ROWS)
    talk.pull(ROWS, [1])
    left[0], now[0] = 1000, 101.0
    for reply in (talk.ask(Command.PULL, keys_of(ROWS, [2])), talk.push(ROWS, [2], [[1]])):
        kind, text = refusal(reply)
        assert kind == "TableError"
        assert names(text, "1,000")
    talk.pull(ROWS, [1, 2], flags=NO_CREATE)
    assert server.state.tables[ROWS.number].num_rows == 1
    left[0], now[0] = 1 << 40, 102.0
    talk.pull(ROWS, [2])


def test_a_very_long_pull_of_a_client_is_made_of_several(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_PULLED", 1000)
    specs = [TableSpec("a", dim=2, rule=Rule("sgd", lr=1.0)), TableSpec("b", dim=1, rule=Rule("sgd", lr=1.0))]
    keys = [np.random.default_rng(dim).integers(0, 50, (40, 20)).astype(np.uint64) for dim in (2, 1)]
    with fleet.client() as client:
        for spec in specs:
            client.create_table(spec)
            client.push(spec.name, range(0, 50, 2), np.full((25, spec.dim), 3, np.float32)).result()
        before = [server.state.counters.num_requests for server in fleet.servers]
        pulled = client.pull_tables({"a": keys[0], "b": keys[1]}).result()
        after = [server.state.counters.num_requests for server in fleet.servers]
        assert [now - num for now, num in zip(after, before, strict=True)] == [10, 10]
    for spec, wanted in zip(specs, keys, strict=True):
        oracle = SgdOracle(spec.dim, 1.0)
        oracle.push(range(0, 50, 2), np.full((25, spec.dim), 3, np.float32))
        assert np.array_equal(pulled.rows[spec.name], oracle.pull(wanted))
    assert pulled.versions == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_a_reply_to_a_long_pull_is_bounded(server: Server) -> None:
    talk = Talk(server)
    wide = TableSpec("wide", dim=1024)
    talk.create(wide)
    keys = keys_of(wide, np.zeros(sliced_pull.MAX_BYTES // 4096 + sliced_pull.WHOLE, np.uint64))
    kind, _ = refusal(talk.ask(Command.PULL, keys))
    assert kind == "TableError"


def test_what_waits_behind_a_long_pull_is_bounded(server: Server) -> None:
    talk = Talk(server)
    talk.create(ROWS)
    assert talk.send(talk.message(Command.PULL, keys_of(ROWS, np.zeros(WHOLE + 1)))) == []
    asked = [talk.send(talk.message(Command.PING)) for _ in range(work_queue.MAX_BEHIND + 1)]
    assert [len(replies) for replies in asked] == [0] * work_queue.MAX_BEHIND + [1]
    assert refusal(asked[-1][0])[0] == "ServerBusy"


def test_pulls_of_a_client_that_creates_rows_are_cut_smaller(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(server)
    talk.create(ROWS)
    sizes, table = [], server.state.tables[ROWS.number]
    real = table.pull
    monkeypatch.setattr(table, "pull", lambda keys, *rest: (sizes.append(len(keys)), real(keys, *rest))[1])
    monkeypatch.setattr(budgets, "GROWTH", 1e6)  # however long the first pull takes
    num = sliced_pull.NEW_WHOLE + 1
    talk.pull(ROWS, range(num))
    assert sizes == [num], "nobody knew it to create rows"
    assert talk.send(talk.message(Command.PULL, keys_of(ROWS, range(num, 2 * num)))) == []
    while server.work():
        pass
    assert max(sizes[1:]) <= sliced_pull.NEW_SLICE
    server.tick(time.monotonic())
    server.state.budgets.forget_idle(time.monotonic() + budgets.GROWTH + 1)
    talk.pull(ROWS, range(num))
    assert sizes[-1] == num, "it is not taken to create rows for ever"
