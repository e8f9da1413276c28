"""EXCHANGE and ENTER: rounds of the network's gradients, their workers, and what a lost worker leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.fleets import Talk, assert_ok, refusal
from support.logged_work import MemorySink, whole_state
from support.messages import names
from support.played_job import SYNC_TIMEOUT, PlayedJob

from torchfleet.ps.net.wire import Array, Command, Reply, Role, pack, unpack
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.meeting.rounds import mean_of
from torchfleet.ps.server.server import Server


class Job(PlayedJob):
    def begin(self, *workers: int) -> None:
        self.workers = [self.process(worker, 0) for worker in range(self.num_workers)]
        for worker in workers or range(self.num_workers):
            self.join(worker)

    def join(self, worker: int, **fields: Any) -> None:
        assert_ok(self.ask_to_join(self.workers[worker], **fields)[-1])

    def give_sign(self, talk: Talk) -> None:
        self.join(talk.worker, again=True)

    def restart(self, worker: int) -> None:
        self.workers[worker] = self.process(worker, 1)
        self.silent.discard(worker)
        self.join(worker)

    def give(self, worker: int, value: float, number: int = 1, **fields: Any) -> list[Reply]:
        talk, data = self.workers[worker], np.full(3, value, np.float32)
        body = {"round": number, "bucket": 0, "workers": list(range(self.num_workers)), **fields}
        return talk.send(talk.message(Command.EXCHANGE, pack(body), Array(0, data)))

    def again(self, worker: int, workers: list[int], number: int = 1) -> Reply:
        body = {"round": number, "bucket": 0, "workers": workers, "again": True}
        return self.workers[worker].ask(Command.EXCHANGE, pack(body))

    def enter(self, worker: int, number: int = 1) -> list[Reply]:
        talk = self.workers[worker]
        return talk.send(talk.message(Command.ENTER, pack({"number": number})))


@pytest.fixture
def job() -> Job:
    made = Job()
    made.begin()
    return made


def means(replies: list[Reply]) -> dict[int, tuple[list[int], float]]:
    """By the worker that is told: the workers of the mean, and the mean."""
    found = {}
    for reply in replies:
        assert_ok(reply)
        found[reply.worker] = unpack(reply.arrays[0], dict)["workers"], float(reply.arrays[1].data[0, 0])
    return found


def entered(replies: list[Reply]) -> dict[int, dict[str, Any]]:
    return {reply.worker: unpack(reply.arrays[0], dict) for reply in replies if reply.command == Command.ENTER}


class TestMean:
    def test_it_is_by_samples_in_the_order_of_the_workers(self) -> None:
        rng = np.random.default_rng(3)
        parts = [(rng.normal(size=(1000, 1)).astype(np.float32), float(n)) for n in (5, 1, 0, 30)]
        expected = np.zeros((1000, 1), np.float32)
        for values, number in parts:
            expected += values * np.float32(number / 36)
        np.testing.assert_array_equal(mean_of(parts), expected)

    @pytest.mark.parametrize("numbers", [(4.0, 4.0, 4.0), (4.0, None, 9.0)])
    def test_equal_or_unknown_numbers_give_the_plain_mean(self, numbers: tuple[float | None, ...]) -> None:
        rng = np.random.default_rng(3)
        blocks: list[npt.NDArray[np.float32]] = [rng.normal(size=(50, 1)).astype(np.float32) for _ in numbers]
        expected = ((blocks[0] + blocks[1]) + blocks[2]) * np.float32(1 / 3)
        np.testing.assert_array_equal(mean_of(list(zip(blocks, numbers, strict=True))), expected)

    def test_what_is_not_finite_comes_through_unless_no_sample_is_behind_it(self) -> None:
        lost, whole = np.full((2, 1), np.inf, np.float32), np.ones((2, 1), np.float32)
        assert np.isinf(mean_of([(lost, 1.0), (whole, 3.0)])).all()
        np.testing.assert_array_equal(mean_of([(lost, 0.0), (whole, 3.0)]), whole)


class TestRounds:
    def test_all_get_the_mean_when_the_last_one_has_come(self, job: Job) -> None:
        assert job.give(2, 9.0, samples=1.0) == []
        assert job.give(0, 3.0, samples=1.0) == []
        assert means(job.give(1, 6.0, samples=1.0)) == {worker: ([0, 1, 2], 6.0) for worker in range(3)}
        told = job.give(0, 0.0)[0]
        assert unpack(told.arrays[0], dict)["told"][2] == [1.0, 0.0, False, []]

    def test_a_repeat_counts_once_and_gets_the_same_reply(self, job: Job) -> None:
        job.give(0, 3.0), job.give(0, 3.0), job.give(1, 6.0)
        job.give(2, 9.0)
        assert means(job.give(2, 1000.0)) == {2: ([0, 1, 2], 6.0)}
        job.give(0, 1.0, 2), job.give(1, 1.0, 2)
        assert means(job.give(2, 1.0, 2))[0] == ([0, 1, 2], 1.0)
        assert refusal(job.give(2, 1.0, 1)[0])[0] == "FleetError"

    def test_buckets_are_apart(self, job: Job) -> None:
        job.give(0, 1.0), job.give(1, 1.0), job.give(0, 4.0, bucket=1), job.give(1, 4.0, bucket=1)
        assert means(job.give(2, 4.0, bucket=1))[2] == ([0, 1, 2], 4.0)
        assert means(job.give(2, 1.0))[2] == ([0, 1, 2], 1.0)

    @pytest.mark.parametrize(
        "fields",
        [{"number": 0}, {"bucket": -1}, {"bucket": 5000}, {"samples": -1.0}, {"samples": float("nan")},
         {"seconds": -1.0}, {"workers": [1]}, {"rates": [float("inf")]}, {"again": True}],
    )  # fmt: skip
    def test_numbers_out_of_range_are_refused(self, job: Job, fields: dict[str, Any]) -> None:
        (reply,) = job.give(0, 1.0, **fields)
        assert refusal(reply)[0] == "WireError"

    def test_another_network_is_refused(self, job: Job) -> None:
        job.give(0, 1.0)
        body = pack({"round": 1, "bucket": 0, "workers": [0, 1, 2]})
        kind, text = refusal(job.workers[1].ask(Command.EXCHANGE, body, Array(0, np.zeros(4, np.float32))))
        assert kind == "TableError"
        assert names(text, "worker 1", 4, 3)

    def test_what_is_kept_is_bounded(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchfleet.ps.server.state.budgets.MAX_KEPT", 1500)
        job.give(0, 1.0)
        (reply,) = job.give(0, 1.0, bucket=1)
        assert refusal(reply)[0] == "ServerBusy"


class TestLoss:
    def test_the_others_go_on_without_a_lost_worker(self, job: Job) -> None:
        job.give(0, 2.0), job.give(1, 4.0)
        assert means(job.lose(2)) == {0: ([0, 1], 3.0), 1: ([0, 1], 3.0)}
        job.give(0, 2.0, 2, workers=[0, 1])
        assert means(job.give(1, 2.0, 2, workers=[0, 1])) == {0: ([0, 1], 2.0), 1: ([0, 1], 2.0)}
        assert refusal(job.give(2, 9.0)[0])[0] == "CountedOut"

    def test_its_part_is_in_the_mean_or_not_as_the_workers_ask(self, job: Job) -> None:
        """Another server had not got its part: the workers ask again, without it."""
        job.give(2, 9.0), job.give(0, 2.0)
        assert means(job.give(1, 4.0))[0] == ([0, 1, 2], 5.0)
        assert means([job.again(0, [0, 1]), job.again(1, [0, 1])]) == {0: ([0, 1], 3.0), 1: ([0, 1], 3.0)}
        job.give(0, 1.0, 2, workers=[0, 1])
        assert means(job.give(1, 1.0, 2, workers=[0, 1]))[1] == ([0, 1], 1.0)
        assert refusal(job.again(0, [0, 1]))[0] == "WireError", "the round is over"
        assert refusal(job.again(0, [0, 2], 2))[0] == "WireError", "it had no part"

    def test_a_worker_that_any_other_knows_to_be_out_is_not_waited_for(self, job: Job) -> None:
        job.give(0, 2.0)
        assert means(job.give(1, 4.0, workers=[0, 1]))[0] == ([0, 1], 3.0)

    def test_an_open_round_does_not_wait_for_the_next_process_of_a_worker(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.give(2, 9.0), job.give(0, 2.0)
        job.lose(2)
        job.restart(2)
        assert means(job.give(1, 4.0))[0] == ([0, 1], 3.0)

    def test_where_no_worker_may_be_missed_the_others_are_told(self) -> None:
        job = Job(on_loss="end")
        job.begin()
        job.give(0, 2.0), job.give(1, 4.0)
        replies = job.lose(2)
        assert [refusal(reply)[0] for reply in replies] == ["WorkerMissing"] * 2
        assert names(refusal(replies[0])[1], "worker 2")

    def test_behind_the_deadline_the_missing_one_is_named(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.give(0, 1.0), job.give(2, 1.0)
        replies = job.later(SYNC_TIMEOUT + 1)
        text = refusal(replies[0])[1]
        assert names(text, 50, "worker 1", "loss.backward()")
        assert "optimizer.step()" not in text

    def test_behind_the_deadline_those_at_the_entrance_are_told_where_they_wait(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.enter(0), job.enter(2)
        replies = job.later(SYNC_TIMEOUT + 1)
        text = refusal(replies[0])[1]
        assert names(text, 50, "worker 1", "model(...)")
        assert not any(place in text for place in ("optimizer.step()", "loss.backward()"))

    def test_workers_that_wait_in_a_round_and_in_a_barrier_are_told(self, job: Job) -> None:
        body = {"name": "b", "num_workers": 3, "timeout": 600.0}
        for worker in (0, 1):
            job.workers[worker].send(job.workers[worker].message(Command.BARRIER, pack(body), once=True))
        job.give(2, 1.0)
        assert {refusal(reply)[0] for reply in job.later(1.0)} == {"WorkerMissing"}


class TestEntrance:
    def test_all_workers_begin_together_with_the_servers_network(self, job: Job) -> None:
        assert job.enter(0) == []
        assert job.enter(2) == []
        told = entered(job.enter(1))
        assert set(told) == {0, 1, 2}
        assert told[0] == told[1] == {"round": 2, "workers": [0, 1, 2], "holders": []}
        assert entered(job.enter(1))[1] == told[1], "a repeat"

    def test_a_worker_that_comes_later_enters_after_the_round_and_is_sent_the_network(self) -> None:
        job = Job(4, min_workers=2)
        job.begin(0, 1)
        job.enter(0)
        assert set(entered(job.enter(1))) == {0, 1}
        job.join(3)
        assert job.enter(3) == []
        job.give(0, 1.0, 2, workers=[0, 1])
        replies = job.give(1, 3.0, 2, workers=[0, 1])
        assert entered(replies) == {3: {"round": 3, "workers": [0, 1, 3], "holders": [0, 1]}}
        assert means([reply for reply in replies if reply.command == Command.EXCHANGE])[0] == ([0, 1], 2.0)
        assert unpack(replies[0].arrays[0], dict)["entering"] == [3]

    @pytest.mark.parametrize("on_loss", ["go_on", "wait"])
    def test_those_whose_batches_end_leave_and_come_back_to_who_has_the_newest_network(self, on_loss: str) -> None:
        job = Job(on_loss=on_loss)
        job.begin()
        for worker in range(3):
            job.enter(worker)
        job.give(0, 1.0, 2, is_last=True), job.give(1, 1.0, 2), job.give(2, 1.0, 2)
        job.give(1, 1.0, 3, workers=[1, 2], is_last=True)
        assert len(job.give(2, 1.0, 3, workers=[1, 2], is_last=True)) == 2
        assert job.enter(0, 2) == [], "1 and 2 have a newer network, and may come back"
        told = entered(job.enter(2, 2))
        assert told[0] == told[2] == {"round": 5, "workers": [0, 2], "holders": [2]}

    def test_when_those_are_gone_the_servers_network_is_the_newest(self, job: Job) -> None:
        for worker in range(3):
            job.enter(worker)
        for worker in range(3):
            job.give(worker, 1.0, 2, is_last=worker == 0)
        job.give(1, 1.0, 3, workers=[1, 2]), job.give(2, 1.0, 3, workers=[1, 2])
        assert job.enter(0, 2) == []
        assert_ok(job.workers[1].ask(Command.LEAVE))
        assert entered(job.lose(2))[0] == {"round": 5, "workers": [0], "holders": []}

    def test_what_the_last_ones_have_left_is_the_newest(self, job: Job) -> None:
        for worker in range(3):
            job.enter(worker)
        for worker in range(3):
            job.give(worker, 1.0, 2, is_last=True)
        assert job.enter(0, 2) != [], "it made the last round itself"
        job.give(0, 1.0, 4, workers=[0], is_last=True)
        copy, talk = Array(0, np.arange(5, dtype=np.uint8)), job.workers[0]
        assert_ok(talk.ask(Command.ENTER, pack({"number": 0, "made": 4}), copy))
        (reply,) = job.enter(1, 2)
        assert unpack(reply.arrays[0], dict) == {"round": 6, "workers": [1], "holders": []}
        assert reply.arrays[1].data.reshape(-1).tolist() == [0, 1, 2, 3, 4]
        assert unpack(job.workers[2].ask(Command.ENTER, pack({"number": 0})).arrays[0], dict) == {"round": 4}
        job.give(1, 1.0, 6, workers=[1])
        assert unpack(job.workers[2].ask(Command.ENTER, pack({"number": 0})).arrays[0], dict) == {"round": 0}
        kind, _ = refusal(talk.ask(Command.ENTER, pack({"number": 0, "made": 4})))
        assert kind == "WireError"


def test_a_log_makes_the_same_rounds_again() -> None:
    job, sink = Job(), MemorySink()
    logged = job.handler = LoggedServer(job.server, [sink], clock=lambda: job.now)
    logged.copy_to(sink.append, lambda: True)
    while logged.is_copying:
        logged.work()
    job.begin()
    for worker in range(3):
        job.enter(worker)
    for worker in range(3):
        job.give(worker, float(worker), 2)
    job.give(0, 2.0, 3), job.give(1, 4.0, 3)
    job.lose(2)
    job.restart(2)
    job.enter(2)
    job.give(0, 1.0, 4, workers=[0, 1])
    replay = Replay(Server(1 << 20, 3, on_worker_loss="go_on"))
    for entry in sink.entries:
        replay.apply(decode_entry(entry))
    replay.finish()
    ours, theirs = whole_state(replay.server), whole_state(job.server)
    assert ours["rounds"] == theirs["rounds"]
    assert ours == theirs
    copied = Job()
    copied.server, copied.handler, copied.now = replay.server, replay.server, job.now
    copied.workers = [Talk(replay.server, t.client, Role.WORKER, t.worker) for t in job.workers]
    assert means([r for r in copied.give(1, 5.0, 4, workers=[0, 1]) if r.command == Command.EXCHANGE])[1] == (
        [0, 1],
        3.0,
    )
