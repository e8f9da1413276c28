"""What the loss of a worker means to the others: `wait`, `go_on`, elastic jobs; and a log decides the same again."""

from __future__ import annotations

from typing import Any

import pytest
from support.fleets import Talk, assert_ok, push_arrays, refusal
from support.logged_work import MemorySink, whole_state
from support.messages import names, naming
from support.played_job import SYNC_TIMEOUT, TIMEOUT, PlayedJob

from torchfleet.base.role.process_settings import loss_of
from torchfleet.ps.net.wire import SYNC, Command, Reply, Role, pack, unpack
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.meeting.presence import RESTART_TIMEOUTS
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

BLOCK = TableSpec("block", "dense", size=1, rule=Rule("sgd", lr=1.0))


class Job(PlayedJob):
    def __init__(self, num_workers: int = 3, on_loss: str = "go_on", min_workers: int = 0) -> None:
        super().__init__(num_workers, on_loss, min_workers)
        self.workers = [self.process(worker, 0) for worker in range(num_workers)]

    def begin(self, *workers: int) -> None:
        Talk(self.handler).create(BLOCK)
        for worker in workers or range(self.num_workers):
            assert_ok(self.join(self.workers[worker]))

    def join(self, talk: Talk, **fields: Any) -> Reply:
        (reply,) = self.ask_to_join(talk, **fields)
        return reply

    def give_sign(self, talk: Talk) -> None:
        self.join(talk, again=True)

    def told(self, talk: Talk, **fields: Any) -> dict[str, int]:
        return unpack(self.join(talk, **fields).arrays[0], dict)

    def push(self, worker: int, grad: float) -> list[Reply]:
        talk = self.workers[worker]
        return talk.send(talk.message(Command.PUSH, *push_arrays(BLOCK, [], [[grad]]), once=True, flags=SYNC))

    def meet(self, worker: int) -> list[Reply]:
        body = {"name": "b", "num_workers": self.num_workers, "timeout": 600.0}
        return self.workers[worker].send(self.workers[worker].message(Command.BARRIER, pack(body), once=True))

    @property
    def value(self) -> float:
        return float(self.server.state.tables[BLOCK.number].whole().reshape(-1)[0])  # type: ignore[union-attr]


@pytest.fixture
def job() -> Job:
    made = Job()
    made.begin()
    return made


class TestEnd:
    """The rule `end`, for workers that their launcher starts again."""

    def test_those_who_wait_wait_for_a_worker_that_is_started_again(self) -> None:
        job = Job(2, "end")
        job.begin(0)
        assert_ok(job.join(job.workers[1], max_restart=2))
        job.meet(0)
        assert job.lose(1) == [], "it may be starting"
        job.workers[1] = job.process(1, 1)
        assert_ok(job.join(job.workers[1], restart=1, max_restart=2))
        job.silent.clear()
        assert job.later(10 * TIMEOUT) == [], "it trains again"
        assert sorted(reply.worker for reply in job.meet(1)) == [0, 1]

    @pytest.mark.parametrize(("restart", "max_restart"), [(0, 0), (2, 2)])
    def test_they_are_told_at_once_of_one_that_is_not(self, restart: int, max_restart: int) -> None:
        job = Job(2, "end")
        job.begin(0)
        assert_ok(job.join(job.workers[1], restart=restart, max_restart=max_restart))
        job.meet(0)
        (reply,) = job.lose(1)
        assert refusal(reply)[0] == "WorkerMissing"

    def test_they_are_told_of_one_that_does_not_come_back(self) -> None:
        job = Job(2, "end")
        job.begin(0)
        assert_ok(job.join(job.workers[1], max_restart=1))
        job.meet(0)
        assert job.lose(1) == []
        (reply,) = job.later(RESTART_TIMEOUTS * TIMEOUT)
        kind, text = refusal(reply)
        assert kind == "WorkerMissing"
        assert names(text, "worker 1")


class TestStarting:
    def test_a_server_stays_while_a_launcher_starts_a_worker_and_ends_afterwards(self) -> None:
        job = Job(1, "end")
        job.begin(0)
        assert_ok(job.join(job.workers[0], again=True, ended=True))
        job.silent.add(0)
        launcher = Talk(job.handler, role=Role.LAUNCHER)
        for _ in range(3 * RESTART_TIMEOUTS):
            assert_ok(launcher.ask(Command.STARTING, pack({"workers": [0], "seconds": 2 * TIMEOUT})))
            job.later(TIMEOUT)
            assert not job.server.is_stopping
        job.later(2 * TIMEOUT)
        assert job.server.is_stopping
        assert names(job.server.desertion, "worker 0", "fleet.stop_worker()")

    @pytest.mark.parametrize("wrong", [{"workers": [3]}, {"workers": [-1]}, {"workers": []}, {"seconds": 0.0}])
    def test_numbers_and_times_that_cannot_be_are_refused(self, job: Job, wrong: dict[str, Any]) -> None:
        body = pack({"workers": [0], "seconds": 1.0, **wrong})
        assert refusal(Talk(job.handler, role=Role.LAUNCHER).ask(Command.STARTING, body))[0] == "WireError"


class TestGoOn:
    def test_a_step_is_the_mean_of_those_who_pushed(self, job: Job) -> None:
        job.push(0, 2.0), job.push(1, 4.0)
        assert [reply.worker for reply in job.lose(2)] == [0, 1]
        assert job.value == -3.0
        assert job.push(0, 1.0) == []
        assert len(job.push(1, 1.0)) == 2  # no worker waits for the lease a second time
        assert job.value == -4.0

    def test_what_the_lost_one_pushed_before_counts(self, job: Job) -> None:
        job.push(2, 9.0)
        assert job.lose(2) == []
        job.push(0, 3.0), job.push(1, 3.0)
        assert job.value == -5.0

    def test_one_that_wakes_up_behind_a_step_is_told_and_changes_nothing(self, job: Job) -> None:
        job.push(0, 2.0), job.push(1, 4.0)
        job.lose(2)
        (reply,) = job.push(2, 100.0)
        kind, text = refusal(reply)
        assert kind == "CountedOut"
        assert names(text, "worker 2", "step 0")
        assert refusal(job.join(job.workers[2], again=True))[0] == "CountedOut"
        assert job.value == -3.0

    def test_one_that_wakes_up_before_a_step_was_made_without_it_goes_on(self, job: Job) -> None:
        job.lose(2)
        job.silent.clear()
        job.later(1.0)
        assert job.push(0, 3.0) == job.push(1, 3.0) == []
        assert len(job.push(2, 3.0)) == 3

    def test_one_that_is_started_again_begins_with_the_step_that_is_open(self, job: Job) -> None:
        job.push(0, 2.0), job.push(1, 4.0)
        job.lose(2)
        job.push(0, 1.0)
        job.workers[2] = job.process(2, 1)
        assert job.told(job.workers[2]) == {"step": 1, "restarts": 1, "num_members": 3}
        assert job.push(1, 1.0) == []
        assert len(job.push(2, 4.0)) == 3
        assert job.value == -5.0

    def test_barriers_and_files_go_on_too(self, job: Job) -> None:
        ask = {"name": "files", "number": 0, "lease": 60.0, "files": ["a"]}
        taken = job.workers[2].ask(Command.FILES, pack({**ask, "take": 1}))
        assert unpack(taken.arrays[0], list) == ["file", "a"]
        job.meet(0), job.meet(1)
        assert sorted(reply.worker for reply in job.lose(2)) == [0, 1]
        again = job.workers[0].ask(Command.FILES, pack({**ask, "take": 1}))
        assert unpack(again.arrays[0], list) == ["file", "a"]

    def test_a_server_that_hears_of_nobody_decides_nothing(self, job: Job) -> None:
        job.push(0, 2.0)
        job.silent = {0, 1, 2}
        assert job.later(2 * TIMEOUT) == []
        assert job.value == 0.0

    def test_servers_end_when_the_others_have_left_and_nobody_comes_back(self, job: Job) -> None:
        job.lose(2)
        for worker in (0, 1):
            assert_ok(job.workers[worker].ask(Command.LEAVE))
        job.later(1.0)
        assert not job.server.is_stopping
        job.later(6 * TIMEOUT)
        assert job.server.is_stopping
        assert not job.server.desertion

    def test_statistics_show_members_and_their_age(self, job: Job) -> None:
        job.lose(2)
        found = unpack(Talk(job.server).ask(Command.STATS).arrays[0], dict)
        members = found["members"]
        assert (members["present"], list(members["lost"]), members["joined"]) == (2, [2], 3)
        assert [(line["worker"], line["is_lost"]) for line in found["workers"]] == [(0, False), (1, False), (2, True)]
        assert all(line["age"] == pytest.approx(TIMEOUT + 1) for line in found["workers"])


class TestWait:
    def test_a_step_waits_for_the_worker_that_is_started_again(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.push(0, 3.0), job.push(1, 3.0), job.push(2, 3.0)
        job.push(0, 2.0), job.push(1, 4.0)
        assert job.lose(2) == []
        job.workers[2] = job.process(2, 1)
        assert job.told(job.workers[2])["step"] == 1
        job.silent.clear()
        assert len(job.push(2, 6.0)) == 3
        assert job.value == -7.0

    def test_the_push_of_the_process_before_is_not_one_of_its_successor(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.push(2, 100.0)
        job.lose(2)
        talk = job.workers[2] = job.process(2, 1)
        body = {"host": "here", "pid": 1, "num_workers": 3, **job.rules, "timeout": TIMEOUT, "sync_timeout": TIMEOUT}
        dropped, told = talk.send(talk.message(Command.JOIN, pack(body)))
        assert refusal(dropped)[0] == "WorkerMissing"
        assert unpack(told.arrays[0], dict)["step"] == 0
        job.push(0, 3.0), job.push(1, 3.0), job.push(2, 3.0)
        assert job.value == -3.0

    def test_behind_the_deadline_those_who_wait_are_told_its_name(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.push(0, 1.0)
        job.silent = {1}
        (reply,) = job.later(SYNC_TIMEOUT + 1)
        kind, text = refusal(reply)
        assert kind == "WorkerMissing"
        assert names(text, 50, "optimizer.step()", "worker 1", 2, 3)
        assert names(text, "worker 1", "pid 101")


class TestElastic:
    def test_those_who_are_there_are_waited_for_and_the_last_one_ends_the_job(self) -> None:
        job = Job(4, min_workers=1)
        job.begin(0, 2)
        assert job.meet(0) == []
        assert len(job.meet(2)) == 2
        assert job.told(job.workers[3])["num_members"] == 3  # one more comes
        job.meet(0), job.meet(2)
        assert len(job.meet(3)) == 3
        assert_ok(job.workers[2].ask(Command.LEAVE))
        job.meet(0)
        assert [reply.worker for reply in job.lose(3)] == [0]  # and one is killed
        again = job.process(2, 1)  # a number is used again
        assert job.told(again) == {"step": 0, "restarts": 1, "num_members": 2}
        for talk in (again, job.workers[0]):
            assert not job.server.is_stopping
            assert_ok(talk.ask(Command.LEAVE))
        job.later(6 * TIMEOUT)
        assert job.server.is_stopping

    @pytest.mark.parametrize("least", [1, 2])
    @pytest.mark.parametrize("has_joined", [True, False])
    def test_workers_that_are_killed_before_the_job_has_begun_do_not_end_it(self, least: int, has_joined: bool) -> None:
        job = Job(4, min_workers=least)
        Talk(job.handler).create(BLOCK)
        for late in (2, 3):
            if has_joined:
                assert_ok(job.join(job.workers[late]))
            assert_ok(Talk(job.handler, client=900 + late, worker=late, role=Role.LAUNCHER).ask(Command.LEAVE))
            assert not job.server.is_stopping
        for worker in range(least):
            assert_ok(job.join(job.workers[worker]))
        for worker in range(least):
            assert not job.server.is_stopping
            assert_ok(job.workers[worker].ask(Command.LEAVE))
        assert job.server.is_stopping

    def test_a_late_copy_of_joining_does_not_bring_back_one_that_has_left(self) -> None:
        job = Job(4, min_workers=1)
        job.begin(0, 2)
        assert_ok(job.workers[2].ask(Command.LEAVE))
        assert job.told(job.workers[2])["num_members"] == 1

    def test_a_worker_that_was_told_of_another_rule_is_refused(self) -> None:
        job = Job(4, min_workers=2)
        kind, text = refusal(job.join(job.workers[0], min_workers=0, on_worker_loss="end"))
        assert kind == "RoleError"
        assert "FLEET_MIN_WORKERS=2" in text


def test_a_log_decides_the_same_again() -> None:
    job, sink = Job(), MemorySink()
    logged = job.handler = LoggedServer(job.server, [sink], clock=lambda: job.now)
    logged.copy_to(sink.append, lambda: True)
    while logged.is_copying:
        logged.work()
    job.workers = [job.process(worker, 0) for worker in range(3)]
    job.begin()
    job.push(0, 2.0), job.push(1, 4.0)
    job.lose(2)
    job.workers[2] = job.process(2, 1)
    job.join(job.workers[2])
    job.push(0, 1.0)
    job.lose(1)
    replay = Replay(Server(1 << 20, 3, on_worker_loss="go_on"))
    for entry in sink.entries:
        replay.apply(decode_entry(entry))
    replay.finish()
    ours, theirs = whole_state(replay.server), whole_state(job.server)
    assert ours["members"] == theirs["members"]
    assert ours == theirs


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"FLEET_MIN_WORKERS": "9"}, "FLEET_MIN_WORKERS FLEET_NUM_WORKERS"),
        ({"FLEET_MIN_WORKERS": "2", "FLEET_ON_WORKER_LOSS": "wait"}, "FLEET_MIN_WORKERS"),
        ({"FLEET_ON_WORKER_LOSS": "stay"}, "FLEET_ON_WORKER_LOSS end wait go_on"),
    ],
)
def test_rules_that_make_no_sense_are_refused(variables: dict[str, str], text: str) -> None:
    with pytest.raises(Exception, match=naming(*text.split())):
        loss_of(variables, 8)
