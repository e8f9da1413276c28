"""EXCHANGE with a quorum: which gradients are in which round, what becomes of late ones, and lost workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fleets import Talk, assert_ok, refusal
from support.logged_work import MemorySink, whole_state
from support.played_job import PlayedJob

from torchfleet.ps.net.wire import Array, Command, Reply, pack, unpack
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.server import Server

FIRST = 2  # the number of the first round: a beginning skips some


class Job(PlayedJob):
    """Three workers with a quorum of two, whose gradients may be two rounds late."""

    def begin(self) -> None:
        self.workers = [self.process(worker, 0) for worker in range(self.num_workers)]
        for worker in range(self.num_workers):
            assert_ok(self.ask_to_join(self.workers[worker])[-1])
        for worker in range(self.num_workers):
            self.enter(worker)

    def give_sign(self, talk: Talk) -> None:
        assert_ok(self.ask_to_join(talk, again=True)[-1])

    def restart(self, worker: int) -> None:
        self.lose(worker)
        self.workers[worker] = self.process(worker, 1)
        self.silent.discard(worker)
        assert_ok(self.ask_to_join(self.workers[worker])[-1])

    def enter(self, worker: int, number: int = 1) -> list[Reply]:
        talk = self.workers[worker]
        return talk.send(talk.message(Command.ENTER, pack({"number": number})))

    def give(self, worker: int, number: int, value: float = 0.0, bucket: int = 0, **fields: Any) -> list[Reply]:
        """Bucket 0 decides."""
        body = {"round": number, "bucket": bucket, "workers": [worker], "quorum": 2, "max_age": 2, "samples": 1.0}
        talk, data = self.workers[worker], np.full(3, value, np.float32)
        body |= {"decides": bucket == 0, **fields}
        return talk.send(talk.message(Command.EXCHANGE, pack(body), Array(0, data)))

    def ask(
        self, worker: int, number: int, parts: list[tuple[int, int]], bucket: int = 1, decides: bool = False
    ) -> list[Reply]:
        talk = self.workers[worker]
        processes = {w: self.workers[w].message(Command.PING).incarnation for w, _ in parts}
        body = {"round": number, "bucket": bucket, "workers": [], "again": True, "quorum": 2, "max_age": 2}
        body |= {"parts": parts, "processes": processes, "decides": decides}
        return talk.send(talk.message(Command.EXCHANGE, pack(body)))

    @property
    def counts(self) -> dict[str, int]:
        found: dict[str, int] = self.server.state.meetings.quorum.stats()["gradients"]
        return found


@pytest.fixture
def job() -> Job:
    made = Job()
    made.begin()
    return made


def told(reply: Reply) -> dict[str, Any]:
    assert_ok(reply)
    found: dict[str, Any] = unpack(reply.arrays[0], dict)
    return found


def means(replies: list[Reply]) -> dict[int, tuple[list[list[int]], float]]:
    """By the worker that is told: whose gradients of which rounds are in the mean, and the mean."""
    return {r.worker: (told(r)["parts"], float(r.arrays[1].data[0, 0])) for r in replies if len(r.arrays) > 1}


class TestRounds:
    def test_a_round_is_made_when_k_workers_have_come(self, job: Job) -> None:
        assert job.give(2, FIRST, 6.0) == []
        made = ([[0, FIRST], [2, FIRST]], 4.0)
        assert means(job.give(0, FIRST, 2.0)) == {0: made, 2: made}

    def test_a_worker_that_misses_one_round_gets_its_mean_and_is_in_the_next_beside_its_k(self, job: Job) -> None:
        job.give(0, FIRST, 2.0), job.give(1, FIRST, 4.0)
        (late,) = job.give(2, FIRST, 30.0)
        assert told(late)["is_late"]
        assert not told(late)["is_dropped"]
        assert means([late]) == {2: ([[0, FIRST], [1, FIRST]], 3.0)}
        assert job.give(0, FIRST + 1, 3.0) == [], "the late one does not count for the quorum"
        replies = job.give(2, FIRST + 1, 6.0)
        parts = [[2, FIRST], [0, FIRST + 1], [2, FIRST + 1]]
        assert means(replies) == {0: (parts, 13.0), 2: (parts, 13.0)}
        assert job.counts == {"on_time": 4, "late": 1, "dropped": 0, "waiting": 0}

    @pytest.mark.parametrize(("rounds", "is_dropped"), [(2, False), (3, True)])
    def test_a_worker_that_misses_more_rounds_enters_again(self, job: Job, rounds: int, is_dropped: bool) -> None:
        """Its gradients are in the open round, unless they are too old."""
        for number in range(FIRST, FIRST + rounds):
            job.give(0, number, 1.0), job.give(1, number, 1.0)
        (late,) = job.give(2, FIRST, 7.0)
        assert told(late) == {"parts": [], "is_late": True, "is_over": True, "is_dropped": is_dropped}
        assert job.counts["dropped"] == is_dropped
        assert job.enter(2, 2) == []
        job.give(0, FIRST + rounds, 1.0)
        replies = job.give(1, FIRST + rounds, 1.0)
        entered = [unpack(reply.arrays[0], dict) for reply in replies if reply.command == Command.ENTER]
        assert entered == [{"round": FIRST + rounds + 1, "workers": [0, 1, 2], "holders": [0, 1]}]
        exchanged = [reply for reply in replies if reply.command == Command.EXCHANGE]
        parts = [[2, FIRST]] * (not is_dropped) + [[0, FIRST + rounds], [1, FIRST + rounds]]
        assert means(exchanged)[0] == (parts, 1.0 if is_dropped else 3.0)
        assert told(exchanged[0])["sender"] in (0, 1)
        assert told(exchanged[0])["entering"] == [2]

    def test_means_are_by_samples_of_late_ones_too(self, job: Job) -> None:
        job.give(0, FIRST, 1.0), job.give(1, FIRST, 1.0)
        job.give(2, FIRST, 9.0, samples=2.0)
        job.give(0, FIRST + 1, 3.0, samples=4.0)
        assert means(job.give(1, FIRST + 1, 1.0, samples=2.0))[0][1] == pytest.approx((18 + 12 + 2) / 8)
        samples = job.server.state.meetings.quorum.stats()["samples"]
        assert samples == {"on_time": 8.0, "late": 2.0, "dropped": 0.0, "waiting": 0.0}

    def test_repeats_count_once_and_get_the_same_replies(self, job: Job) -> None:
        job.give(0, FIRST, 2.0), job.give(0, FIRST, 2.0)
        made = means(job.give(1, FIRST, 4.0))[1]
        assert means(job.give(1, FIRST, 1000.0)) == {1: made}
        late = means(job.give(2, FIRST, 3.0))
        assert means(job.give(2, FIRST, 3.0)) == late
        job.give(1, FIRST + 1, 3.0)
        assert means(job.give(0, FIRST + 1, 3.0))[0] == ([[2, FIRST], [0, FIRST + 1], [1, FIRST + 1]], 3.0)
        assert refusal(job.give(0, FIRST, 2.0)[0])[0] == "FleetError"
        assert job.counts == {"on_time": 4, "late": 1, "dropped": 0, "waiting": 0}

    @pytest.mark.parametrize(
        "fields",
        [{"quorum": -1}, {"quorum": 1 << 20}, {"max_age": -1}, {"bucket": 1, "decides": True}, {"round": 2**64 - 1}],
    )
    def test_numbers_out_of_range_are_refused(self, job: Job, fields: dict[str, Any]) -> None:
        (reply,) = job.give(0, FIRST, **fields)
        assert refusal(reply)[0] == "WireError"

    def test_a_worker_whose_answer_was_lost_while_others_went_on_enters_again(self, job: Job) -> None:
        job.give(2, FIRST, 1.0), job.give(0, FIRST, 1.0)  # made; the answer to worker 2 is lost
        job.give(0, FIRST + 1, 1.0), job.give(1, FIRST + 1, 1.0)
        counts = job.counts
        (reply,) = job.give(2, FIRST, 1.0)
        assert told(reply) == {"parts": [], "is_over": True}
        assert job.counts == counts
        assert job.enter(2, 2) == []
        job.give(0, FIRST + 2, 1.0)
        replies = job.give(1, FIRST + 2, 1.0)
        assert [reply.worker for reply in replies if reply.command == Command.ENTER] == [2]

    def test_the_mean_of_an_open_round_cannot_be_asked_for(self, job: Job) -> None:
        assert job.give(1, FIRST, 4.0) == []
        assert refusal(job.ask(0, FIRST, [(1, FIRST)], bucket=0)[0])[0] == "WireError"
        assert means(job.give(0, FIRST, 2.0))[1] == ([[0, FIRST], [1, FIRST]], 3.0)

    def test_gradients_of_another_size_change_nothing(self, job: Job) -> None:
        assert job.give(1, FIRST, 4.0) == []
        meetings, talk = job.server.state.meetings, job.workers[0]
        before = meetings.quorum.export(), meetings.rounds.newest
        body = {"round": FIRST + 1, "bucket": 0, "workers": [0], "quorum": 2, "max_age": 2, "decides": True}
        wrong = talk.message(Command.EXCHANGE, pack(body), Array(0, np.zeros(4, np.float32)))
        assert refusal(talk.send(wrong)[0])[0] == "TableError"
        assert (meetings.quorum.export(), meetings.rounds.newest) == before
        assert means(job.give(0, FIRST, 2.0))[1] == ([[0, FIRST], [1, FIRST]], 3.0)


PARTS = [(0, FIRST), (1, FIRST)]


class TestOtherBuckets:
    def test_a_mean_waits_for_the_gradients_that_were_decided_on(self, job: Job) -> None:
        for worker in (0, 2):
            assert_ok(job.give(worker, FIRST, 2.0, bucket=1)[0])
        assert job.ask(0, FIRST, PARTS) == []
        assert job.ask(1, FIRST, PARTS) == []
        replies = job.give(1, FIRST, 4.0, bucket=1)
        assert means(replies) == {0: ([[0, FIRST], [1, FIRST]], 3.0), 1: ([[0, FIRST], [1, FIRST]], 3.0)}
        assert means(job.ask(2, FIRST, PARTS)) == {2: ([[0, FIRST], [1, FIRST]], 3.0)}

    def test_who_asks_for_an_earlier_round_is_told_that_it_is_over(self, job: Job) -> None:
        for number in (FIRST, FIRST + 1):
            for worker in (0, 1):
                job.give(worker, number, 1.0, bucket=1)
            job.ask(0, number, [(0, number), (1, number)])
        (reply,) = job.ask(2, FIRST, PARTS)
        assert told(reply) == {"is_over": True}

    def test_what_a_lost_worker_has_not_given_is_left_out_everywhere(self, job: Job) -> None:
        """Worker 1 is killed when it has given the first bucket, and not yet the second one."""
        job.give(0, FIRST, 2.0, bucket=1)
        job.give(1, FIRST, 8.0)
        assert set(means(job.give(0, FIRST, 2.0))) == {0, 1}
        assert job.ask(0, FIRST, PARTS) == []
        assert means(job.lose(1)) == {0: ([[0, FIRST]], 2.0)}
        assert means(job.ask(2, FIRST, PARTS)) == {2: ([[0, FIRST]], 2.0)}, "who asks later is told the same"
        assert means(job.ask(0, FIRST, [(0, FIRST)], bucket=0, decides=True)) == {0: ([[0, FIRST]], 2.0)}
        assert job.counts == {"on_time": 1, "late": 0, "dropped": 1, "waiting": 0}

    def test_the_next_process_of_a_worker_does_not_give_what_the_earlier_one_owed(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.give(0, FIRST, 2.0, bucket=1)
        processes = {worker: job.workers[worker].message(Command.PING).incarnation for worker in (0, 1)}
        job.give(1, FIRST, 8.0), job.give(0, FIRST, 2.0)
        talk = job.workers[0]
        body = {"round": FIRST, "bucket": 1, "workers": [], "again": True, "quorum": 2, "max_age": 2}
        asked = pack({**body, "parts": PARTS, "processes": processes})
        assert talk.send(talk.message(Command.EXCHANGE, asked)) == []
        job.restart(1)
        assert means([job.ask(0, FIRST, [(0, FIRST)])[0]]) == {0: ([[0, FIRST]], 2.0)}


class TestMembers:
    def test_a_quorum_larger_than_the_workers_that_are_left_is_all_of_them(self, job: Job) -> None:
        job.lose(1), job.lose(2)
        assert means(job.give(0, FIRST, 5.0)) == {0: ([[0, FIRST]], 5.0)}

    def test_what_a_replaced_process_gave_to_the_open_round_is_dropped(self) -> None:
        job = Job(on_loss="wait")
        job.begin()
        job.give(0, FIRST, 1.0), job.give(1, FIRST, 1.0), job.give(2, FIRST, 9.0)
        job.give(2, FIRST + 1, 9.0)
        job.restart(2)
        job.give(0, FIRST + 1, 1.0)
        assert means(job.give(1, FIRST + 1, 3.0))[0] == ([[0, FIRST + 1], [1, FIRST + 1]], 2.0)
        assert job.counts == {"on_time": 4, "late": 0, "dropped": 2, "waiting": 0}

    def test_the_last_one_to_leave_is_told_to_leave_the_network(self, job: Job) -> None:
        """Worker 2 is late in the last round of the others, and gets its mean."""
        job.give(0, FIRST, 1.0, is_last=True)
        (first, _) = job.give(1, FIRST, 1.0, is_last=True)
        assert "leaver" not in told(first)
        (late,) = job.give(2, FIRST, 1.0, is_last=True)
        assert told(late)["leaver"] == 2
        assert job.counts["waiting"] == 1, "no round came after it"

    def test_workers_that_all_leave_on_time_leave_the_network_by_the_first(self) -> None:
        job = Job(2)
        job.begin()
        job.give(1, FIRST, 1.0, is_last=True)
        assert [told(reply)["leaver"] for reply in job.give(0, FIRST, 1.0, is_last=True)] == [0, 0]

    def test_who_is_late_for_the_first_round_of_a_new_beginning_is_late_by_one(self, job: Job) -> None:
        """Worker 0 is lost, and the others wait at the entrance."""
        for number in (FIRST, FIRST + 1):
            job.give(0, number, 1.0), job.give(1, number, 1.0, is_last=number > FIRST)
        assert told(job.give(2, FIRST, 1.0)[0])["is_over"]
        job.enter(1, 2), job.enter(2, 2)
        begun = FIRST + 3
        entered = [unpack(reply.arrays[0], dict) for reply in job.lose(0)]
        assert entered == [{"round": begun, "workers": [1, 2], "holders": [1]}] * 2
        job.give(1, begun, 3.0, quorum=1, max_age=0)
        (late,) = job.give(2, begun, 5.0, quorum=1, max_age=0)
        assert means([late]) == {2: ([[1, begun]], 3.0)}

    def test_where_a_lost_worker_ends_the_job_a_late_one_can_still_enter_when_the_others_are_done(self) -> None:
        job = Job(on_loss="end")
        job.begin()
        for number in (FIRST, FIRST + 1):
            job.give(0, number, 1.0, is_last=number > FIRST), job.give(1, number, 1.0, is_last=number > FIRST)
        assert told(job.give(2, FIRST, 1.0)[0])["is_over"]
        talk, copy = job.workers[0], Array(0, np.arange(5, dtype=np.uint8))
        assert job.enter(2, 2) == []
        reply, entered = talk.send(talk.message(Command.ENTER, pack({"number": 0, "made": FIRST + 1}), copy))[::-1]
        assert {reply.worker, entered.worker} == {0, 2}


def test_a_log_makes_the_same_rounds_again() -> None:
    job, sink = Job(), MemorySink()
    logged = job.handler = LoggedServer(job.server, [sink], clock=lambda: job.now)
    logged.copy_to(sink.append, lambda: True)
    while logged.is_copying:
        logged.work()
    job.begin()
    for number in (FIRST, FIRST + 1):
        for worker in (0, 1):
            job.give(worker, number, 1.0, bucket=1), job.give(worker, number, 1.0)
            job.ask(worker, number, [(0, number), (1, number)])
    job.give(2, FIRST, 5.0, bucket=1), job.give(2, FIRST, 5.0)
    job.enter(2, 2)
    job.give(0, FIRST + 2, 1.0)
    replay = Replay(Server(1 << 20, 3, on_worker_loss="go_on"))
    for entry in sink.entries:
        replay.apply(decode_entry(entry))
    replay.finish()
    ours, theirs = whole_state(replay.server), whole_state(job.server)
    assert ours["quorum"] == theirs["quorum"]
    assert ours == theirs
