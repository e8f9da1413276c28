"""Workers meet: all arrive and all go on, or those who waited are told who is missing."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fleets import WAIT, Fleet, Talk, assert_ok, endpoints, in_process, in_threads, refusal
from support.messages import names, naming
from support.scripts.launching import wait_until

from torchfleet.base.errors import BarrierError, FleetError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Command, Message, Role, pack
from torchfleet.ps.server.meeting import barrier as module
from torchfleet.ps.server.meeting.barrier import Barriers
from torchfleet.ps.server.server import Server
from torchfleet.ps.worker.client.connection import Patience


def request(worker: int, call: int = 1) -> Request:
    return Request(Message(Command.BARRIER, worker=worker, call=call), peer=f"peer {worker}")


class TestBarriers:
    """The list of barriers by itself; time is what the test says it is."""

    def test_nobody_goes_before_the_last_has_come(self) -> None:
        barriers = Barriers()
        first, second, third = request(0), request(1), request(2)
        assert barriers.arrive("b", first, 3, 10, now=0) == []
        assert barriers.arrive("b", third, 3, 10, now=1) == []
        assert barriers.arrive("b", second, 3, 10, now=2) == [first, third, second]

    def test_one_worker_does_not_wait(self) -> None:
        only = request(0)
        assert Barriers().arrive("b", only, 1, 10, now=0) == [only]

    def test_a_repeat_takes_the_place_of_the_first(self) -> None:
        barriers = Barriers()
        lost, repeated, other = request(0, call=1), request(0, call=2), request(1)
        assert barriers.arrive("b", lost, 2, 10, now=0) == []
        assert barriers.arrive("b", repeated, 2, 10, now=1) == []
        assert barriers.arrive("b", other, 2, 10, now=2) == [repeated, other]

    def test_a_name_can_be_used_again(self) -> None:
        barriers = Barriers()
        for _ in range(3):
            assert barriers.arrive("b", request(0), 2, 10, now=0) == []
            assert len(barriers.arrive("b", request(1), 2, 10, now=0)) == 2

    def test_names_are_barriers_of_their_own(self) -> None:
        barriers = Barriers()
        assert barriers.arrive("a", request(0), 2, 10, now=0) == []
        assert barriers.arrive("b", request(1), 2, 10, now=0) == []

    def test_who_has_left_is_not_waited_for(self) -> None:
        barriers = Barriers()
        barriers.leave(1)
        only = request(0)
        assert barriers.arrive("b", only, 2, 10, now=0) == [only]

    def test_the_last_missing_worker_opens_every_barrier_by_leaving(self) -> None:
        barriers = Barriers()
        first, second = request(0), request(1)
        barriers.arrive("a", first, 3, 10, now=0)
        barriers.arrive("a", second, 3, 10, now=0)
        barriers.arrive("b", first, 2, 10, now=0)
        barriers.arrive("b", second, 2, 10, now=0)
        assert barriers.leave(2) == [first, second]

    def test_one_who_left_and_comes_again_is_waited_for_again(self) -> None:
        barriers = Barriers()
        barriers.leave(1)
        barriers.arrive("a", request(1), 2, 10, now=0)
        assert barriers.arrive("b", request(0), 2, 10, now=0) == []

    def test_one_whose_process_is_a_new_one_is_waited_for_again(self) -> None:
        barriers = Barriers()
        barriers.arrive("b", request(0), 2, 10, now=0)
        barriers.arrive("alone", request(0), 2, 10, now=0)
        barriers.forget(0)
        assert list(barriers.waiting()) == []
        other, again = request(1), request(0, call=2)
        assert barriers.arrive("b", other, 2, 10, now=1) == []
        assert barriers.arrive("b", again, 2, 10, now=2) == [other, again]

    def test_the_time_out_names_who_is_missing_to_everybody_who_waits(self) -> None:
        barriers = Barriers()
        barriers.leave(3)
        waiting = [request(0), request(4)]
        for arriving in waiting:
            barriers.arrive("epoch 1", arriving, 5, 10, now=0)
        assert barriers.expired(now=9.9) == []
        given_up = barriers.expired(now=10)
        assert [refused for refused, _ in given_up] == waiting
        for _, error in given_up:
            assert "'epoch 1'" in str(error)
            assert names(str(error), 10, "worker 1", 2, 5)
        assert barriers.expired(now=1000) == []

    def test_after_a_time_out_the_name_is_free(self) -> None:
        barriers = Barriers()
        barriers.arrive("b", request(0), 2, 10, now=0)
        barriers.expired(now=10)
        assert barriers.arrive("b", request(1), 2, 10, now=11) == []
        assert len(barriers.arrive("b", request(0), 2, 10, now=12)) == 2

    def test_another_number_of_workers_is_refused_and_the_waiting_wait_on(self) -> None:
        barriers = Barriers()
        barriers.arrive("b", request(0), 2, 10, now=0)
        with pytest.raises(BarrierError, match=naming("'b'", 2, "worker 1", 3)):
            barriers.arrive("b", request(1), 3, 10, now=0)
        assert len(barriers.arrive("b", request(1), 2, 10, now=0)) == 2

    def test_a_worker_whose_number_is_too_high_is_refused(self) -> None:
        with pytest.raises(BarrierError, match=naming("'b'", 2, "worker 2")):
            Barriers().arrive("b", request(2), 2, 10, now=0)

    def test_a_refused_worker_leaves_no_barrier_behind(self) -> None:
        """Else its wrong number of workers would stand until the time-out, which may be days away."""
        barriers = Barriers()
        with pytest.raises(BarrierError):
            barriers.arrive("b", request(5), 2, 7 * 24 * 3600, now=0)
        assert barriers.arrive("b", request(0), 6, 10, now=1) == []

    def test_the_number_of_barriers_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_NAMES", 3)
        barriers = Barriers()
        for name in "abc":
            barriers.arrive(name, request(0), 2, 10, now=0)
        with pytest.raises(BarrierError, match=naming("barriers", 3)):
            barriers.arrive("d", request(0), 2, 10, now=0)
        assert len(barriers.arrive("a", request(1), 2, 10, now=0)) == 2


def body(name: str = "b", num_workers: int = 2, timeout: float = 10.0) -> object:
    return pack({"name": name, "num_workers": num_workers, "timeout": timeout})


class TestServer:
    """Through messages, by hand."""

    def test_a_reply_goes_to_everybody_who_waited(self, server: Server) -> None:
        talks = [Talk(server, client=i + 1, worker=i) for i in range(3)]
        assert talks[0].send(talks[0].message(Command.BARRIER, body(num_workers=3), once=True)) == []
        assert talks[1].send(talks[1].message(Command.BARRIER, body(num_workers=3), once=True)) == []
        frames = talks[2].message(Command.BARRIER, body(num_workers=3), once=True)
        replies = talks[2].send(frames)
        assert sorted(reply.worker for reply in replies) == [0, 1, 2]
        for reply in replies:
            assert_ok(reply)

    def test_a_repeated_message_is_answered_once_and_after_the_opening_again(self, server: Server) -> None:
        first, second = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        message = first.message(Command.BARRIER, body(), once=True)
        assert first.send(message) == []
        assert first.send(message) == []
        assert len(second.send(second.message(Command.BARRIER, body(), once=True))) == 2
        (late,) = first.send(message)  # the copy of a message that has been answered must not wait at a new barrier
        assert_ok(late)
        assert len(server.state.meetings.barriers._meetings) == 0

    def test_a_time_out_is_answered_by_the_clock_and_repeated(self, server: Server) -> None:
        talk = Talk(server)
        message, before = talk.message(Command.BARRIER, body(timeout=5.0), once=True), time.monotonic()
        assert talk.send(message) == []
        assert server.tick(before + 4) == []
        (_,) = server.tick(time.monotonic() + 6)
        (again,) = talk.send(message)
        kind, text = refusal(again)
        assert kind == "BarrierError"
        assert names(text, "worker 1", 2)

    def test_leaving_lets_the_others_go(self, server: Server) -> None:
        first, second = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        assert first.send(first.message(Command.BARRIER, body(), once=True)) == []
        replies = second.send(second.message(Command.LEAVE))
        assert sorted((reply.command, reply.worker) for reply in replies) == [(Command.BARRIER, 0), (Command.LEAVE, 1)]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"timeout": 0.0},
            {"timeout": -1.0},
            {"timeout": float("nan")},
            {"timeout": float("inf")},
            {"timeout": 1e9},
            {"num_workers": 0},
            {"num_workers": -5},
        ],
        ids=str,
    )
    def test_impossible_numbers_are_refused(self, server: Server, wrong: dict[str, float]) -> None:
        assert refusal(Talk(server).ask(Command.BARRIER, body(**wrong), once=True))[0] == "WireError"

    def test_a_huge_number_of_workers_takes_no_memory(self, server: Server) -> None:
        """A message of 60 bytes must not cost the server more than a little: neither to keep nor to answer."""
        talk = Talk(server)
        tracemalloc.start()
        try:
            talk.send(talk.message(Command.BARRIER, body(num_workers=300_000), once=True))
            _, peak = tracemalloc.get_traced_memory()
            answers = [len(bytes(memoryview(frames[-1]))) for _, frames in server.tick(time.monotonic() + 11)]
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000, f"it took {peak:,} bytes"
        assert all(num_bytes < 10_000 for num_bytes in answers)


@pytest.fixture(params=["in process", "tcp"])
def met_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    way = in_process(2) if request.param == "in process" else in_threads(endpoints("tcp", 2, tmp_path))
    with way as fleet:
        yield fleet


@pytest.fixture
def workers() -> Iterator[Callable[..., Future]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


class TestWorkers:
    """Real threads, each with a client of its own."""

    def test_all_are_released_when_the_last_arrives(self, met_fleet: Fleet, workers: Callable[..., Future]) -> None:
        passed: list[int] = []

        def work(worker: int) -> None:
            with met_fleet.client(worker=worker) as client:
                for step in range(5):
                    client.barrier("step", 4, timeout=WAIT)
                    passed.append(step)
                client.barrier("end", 4, timeout=WAIT)

        early = [workers(work, i) for i in range(3)]
        time.sleep(0.3)
        assert passed == []
        late = workers(work, 3)
        for future in (*early, late):
            future.result(WAIT)
        assert passed == sorted(passed), "somebody passed a barrier that others had not reached"
        assert len(passed) == 4 * 5

    def test_a_worker_that_leaves_is_not_waited_for(self, met_fleet: Fleet, workers: Callable[..., Future]) -> None:
        waiting = [workers(met_fleet.client(worker=i).barrier, "b", 3, WAIT) for i in range(2)]
        time.sleep(0.2)
        assert not any(future.done() for future in waiting)
        met_fleet.client(worker=2, role=Role.LAUNCHER).leave()
        for future in waiting:
            future.result(WAIT)

    def test_the_time_out_names_the_missing(self, met_fleet: Fleet, workers: Callable[..., Future]) -> None:
        started = time.monotonic()
        waiting = [workers(met_fleet.client(worker=i).barrier, "b", 4, 0.5) for i in (0, 2)]
        for future in waiting:
            with pytest.raises(BarrierError, match=naming("0.5", 1, 3, 4)):  # one may come when the other was told
                future.result(WAIT)
        assert time.monotonic() - started > 0.4

    def test_workers_that_disagree_about_their_number_are_told(
        self, met_fleet: Fleet, workers: Callable[..., Future]
    ) -> None:
        first = workers(met_fleet.client(worker=0).barrier, "b", 2, WAIT)
        wait_until(lambda: met_fleet.num_requests > 0, WAIT, "request of worker 0")
        with pytest.raises(BarrierError, match=naming("'b'", 2, 3)):
            met_fleet.client(worker=1).barrier("b", 3, WAIT)
        met_fleet.client(worker=1).barrier("b", 2, WAIT)
        first.result(WAIT)

    def test_a_client_waits_for_as_long_as_it_says_and_not_as_long_as_its_patience(
        self, met_fleet: Fleet, workers: Callable[..., Future]
    ) -> None:
        first = workers(met_fleet.client(worker=0, patience=Patience(8.0, 2)).barrier, "b", 2, WAIT)
        time.sleep(9.5)
        assert not first.done()
        met_fleet.client(worker=1).barrier("b", 2, WAIT)
        first.result(WAIT)

    def test_an_impossible_wait_is_refused(self, met_fleet: Fleet) -> None:
        with pytest.raises(FleetError, match="timeout"):
            met_fleet.client().barrier("b", 1, timeout=0)
