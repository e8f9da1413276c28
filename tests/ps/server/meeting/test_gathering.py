"""Every worker brings bytes, and all get everybody's: by hand, as messages, and over sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import WAIT, Fleet, Talk, assert_ok, endpoints, in_process, in_threads, refusal
from support.messages import names, naming
from support.scripts.launching import wait_until
from support.searches import examples

from torchfleet.base.errors import BarrierError, FleetError, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array, Command, Message, Role, pack
from torchfleet.ps.server.meeting import gathering as module
from torchfleet.ps.server.meeting.gathering import GatherBody, Gatherings
from torchfleet.ps.server.server import Server
from torchfleet.ps.worker.peers import Workers


def body(name: str = "g", round_number: int = 1, num_workers: int = 2, timeout: float = 10.0) -> GatherBody:
    return GatherBody(name, round_number, num_workers, timeout)


def request(worker: int, data: bytes = b"", client: int | None = None, call: int = 1, arrived: float = 0.0) -> Request:
    arrays = [Array(0, np.empty(0, np.uint8)), Array(0, np.frombuffer(data, np.uint8))]
    number = 100 + worker if client is None else client
    return Request(Message(Command.GATHER, worker=worker, client=number, call=call, arrays=arrays), worker, arrived)


def found(reply: list[Array]) -> list[tuple[int, bytes]]:
    return [(array.number, array.data.tobytes()) for array in reply]


class TestGatherings:
    """By themselves; time is what the test says it is."""

    @settings(max_examples=examples(100))
    @given(st.data())
    def test_everybody_who_has_not_left_gets_everybodys_bytes_in_the_order_of_workers(
        self, data: st.DataObject
    ) -> None:
        num = data.draw(st.integers(1, 6))
        gone = data.draw(st.sets(st.integers(0, num - 1), max_size=num - 1))
        brought = {i: data.draw(st.binary(max_size=20)) for i in range(num) if i not in gone}
        events = data.draw(st.permutations(range(num)))  # each comes, or leaves
        gatherings = Gatherings()
        answers = []
        for at, worker in enumerate(events):
            if worker in gone:
                answers = gatherings.leave(worker)
            else:
                answers = gatherings.arrive(body(num_workers=num), request(worker, brought[worker]))
            if at < num - 1:
                assert answers == []
        assert sorted(asked.message.worker for asked, _ in answers) == sorted(brought)
        for _, reply in answers:
            assert found(reply) == sorted(brought.items())

    def test_a_second_gathering_right_after_the_first_holds_only_its_own_bytes(self) -> None:
        gatherings = Gatherings()
        for number in (1, 2, 3):
            for worker in (0, 1):
                data = f"{worker} in {number}".encode()
                answers = gatherings.arrive(body(round_number=number), request(worker, data, call=number))
            expected = [(0, f"0 in {number}".encode()), (1, f"1 in {number}".encode())]
            assert [found(reply) for _, reply in answers] == [expected, expected]

    def test_names_are_gatherings_of_their_own(self) -> None:
        gatherings = Gatherings()
        assert gatherings.arrive(body("a"), request(0)) == []
        assert gatherings.arrive(body("b"), request(1)) == []

    def test_a_repeat_after_a_lost_reply_gets_the_same_answer(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body(), request(0, b"zero"))
        ((_, first), _) = gatherings.arrive(body(), request(1, b"one"))
        for _ in range(3):
            ((to, again),) = gatherings.arrive(body(), request(0, b"zero", call=1))
            assert to.message.worker == 0
            assert found(again) == found(first) == [(0, b"zero"), (1, b"one")]

    def test_a_repeat_gets_its_answer_although_the_other_worker_waits_for_the_next_one_already(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body(), request(0, b"zero"))
        gatherings.arrive(body(), request(1, b"one"))
        assert gatherings.arrive(body(round_number=2), request(1, b"one again", call=2)) == []
        ((_, again),) = gatherings.arrive(body(), request(0, b"zero"))
        assert found(again) == [(0, b"zero"), (1, b"one")]
        answers = gatherings.arrive(body(round_number=2), request(0, b"zero again", call=2))
        assert [found(reply) for _, reply in answers] == [[(0, b"zero again"), (1, b"one again")]] * 2

    def test_a_repeat_of_one_who_waits_is_answered_once_in_the_end(self) -> None:
        gatherings = Gatherings()
        assert gatherings.arrive(body(), request(0, b"zero")) == []
        repeat = request(0, b"zero")
        assert gatherings.arrive(body(), repeat) == []
        answers = gatherings.arrive(body(), request(1, b"one"))
        assert [asked.message.worker for asked, _ in answers] == [0, 1]
        assert answers[0][0] is repeat

    def test_a_late_copy_of_an_old_request_takes_no_part_in_a_new_gathering(self) -> None:
        """It comes after two gatherings have closed; its worker has not come to the third."""
        gatherings = Gatherings()
        for number in (1, 2):
            for worker in (0, 1):
                gatherings.arrive(body(round_number=number), request(worker, b"old", call=number))
        gatherings.arrive(body(round_number=1), request(0, b"old", call=1))
        early = gatherings.arrive(body(round_number=3), request(1, b"one", call=3))
        assert [found(reply) for _, reply in early] == [], "worker 0 has not come, a copy of its old request has"
        answers = gatherings.arrive(body(round_number=3), request(0, b"zero", call=3))
        assert [found(reply) for _, reply in answers] == [[(0, b"zero"), (1, b"one")]] * 2

    def test_a_late_copy_of_an_old_request_does_not_take_the_place_of_the_one_that_waits(self) -> None:
        gatherings = Gatherings()
        for number in (1, 2):
            for worker in (0, 1):
                gatherings.arrive(body(round_number=number), request(worker, b"old", call=number))
        assert gatherings.arrive(body(round_number=3), request(0, b"zero", call=3)) == []
        gatherings.arrive(body(round_number=1), request(0, b"old", call=1))
        answers = gatherings.arrive(body(round_number=3), request(1, b"one", call=3))
        assert [found(reply) for _, reply in answers] == [[(0, b"zero"), (1, b"one")]] * 2
        assert answers[0][0].message.call == 3

    def test_a_late_copy_after_a_time_out_does_not_stand_for_its_worker(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body(round_number=1, timeout=5), request(0, b"old", call=1, arrived=0))
        assert len(gatherings.expired(now=6)) == 1
        gatherings.arrive(body(round_number=1, timeout=5), request(0, b"old", call=1, arrived=7))
        early = gatherings.arrive(body(round_number=1, timeout=5), request(1, b"one", call=1, arrived=8))
        replies = [found(reply) for asked, reply in early if asked.message.worker == 1]
        assert replies == [], "worker 0 has been told that it failed, and worker 1 that all are here"

    def test_one_client_at_two_gatherings_gets_both(self) -> None:
        gatherings = Gatherings()
        assert gatherings.arrive(body("a", 1), request(0, b"a0", call=1)) == []
        assert gatherings.arrive(body("b", 2), request(0, b"b0", call=2)) == []
        answers = gatherings.arrive(body("a", 1), request(1, b"a1", call=1))
        assert [found(reply) for _, reply in answers] == [[(0, b"a0"), (1, b"a1")]] * 2
        answers = gatherings.arrive(body("b", 2), request(1, b"b1", call=2))
        assert [found(reply) for _, reply in answers] == [[(0, b"b0"), (1, b"b1")]] * 2

    def test_a_worker_that_was_started_again_takes_the_place_of_its_former_process(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body(), request(0, b"dead", client=7))
        gatherings.arrive(body(), request(0, b"alive", client=8))
        answers = gatherings.arrive(body(), request(1, b"one"))
        assert [asked.message.client for asked, _ in answers] == [8, 101]
        assert found(answers[0][1]) == [(0, b"alive"), (1, b"one")]

    def test_a_worker_that_is_started_again_and_again_leaves_nothing_behind(self) -> None:
        gatherings = Gatherings()
        for client in range(1000):
            gatherings.arrive(body(), request(0, b"x", client=client))
        gatherings.arrive(body(), request(1, b"y"))
        assert sum(len(kept) for kept in vars(gatherings).values() if isinstance(kept, dict)) < 10

    def test_who_has_left_and_comes_again_is_waited_for_again(self) -> None:
        gatherings = Gatherings()
        gatherings.leave(1)
        assert len(gatherings.arrive(body(), request(0, b"zero"))) == 1
        gatherings.arrive(body("other"), request(1, b"one"))
        assert gatherings.arrive(body(round_number=2), request(0, b"zero", call=2)) == []

    def test_one_who_leaves_closes_every_gathering_that_waits_for_it_alone(self) -> None:
        gatherings = Gatherings()
        for name in ("a", "b"):
            for worker in (0, 1):
                arrived = request(worker, f"{name}{worker}".encode(), client=10 * ord(name) + worker)
                assert gatherings.arrive(body(name, num_workers=3), arrived) == []
        replies = {asked.message.client: found(reply) for asked, reply in gatherings.leave(2)}
        assert replies == {
            10 * ord(name) + worker: [(0, f"{name}0".encode()), (1, f"{name}1".encode())]
            for name in ("a", "b")
            for worker in (0, 1)
        }

    def test_the_time_out_names_who_is_missing_and_frees_the_name(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body("sizes", num_workers=4, timeout=5), request(0, arrived=0))
        gatherings.arrive(body("sizes", num_workers=4, timeout=5), request(2, arrived=1))
        assert gatherings.expired(now=4.9) == []
        given_up = gatherings.expired(now=5)
        assert [asked.message.worker for asked, _ in given_up] == [0, 2]
        for _, error in given_up:
            assert "'sizes'" in str(error)
            assert names(str(error), "worker 1", 3, 4)
        answers = []
        for worker in (0, 1):
            late = request(worker, b"x", call=2, arrived=6)
            answers = gatherings.arrive(body("sizes", 2, num_workers=2, timeout=5), late)
        assert len(answers) == 2

    @pytest.mark.parametrize("size", [0, 1, module.MAX_BYTES])
    def test_any_size_up_to_the_limit_travels(self, size: int) -> None:
        gatherings = Gatherings()
        data = np.random.default_rng(size).bytes(size)
        gatherings.arrive(body(), request(0, data))
        answers = gatherings.arrive(body(), request(1, b""))
        assert found(answers[0][1]) == [(0, data), (1, b"")]

    def test_more_than_the_limit_is_refused_and_changes_nothing(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body("big"), request(0, b"zero"))
        with pytest.raises(TableError, match=naming("'big'", "16,777,217", "16,777,216")):
            gatherings.arrive(body("big"), request(1, bytes(module.MAX_BYTES + 1)))
        assert len(gatherings.arrive(body("big"), request(1, b"one", call=2))) == 2

    def test_another_number_of_workers_is_refused_and_the_waiting_wait_on(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body(num_workers=2), request(0, b"zero"))
        with pytest.raises(BarrierError, match=naming(2, "worker 1", 3)):
            gatherings.arrive(body(num_workers=3), request(1, b"one"))
        with pytest.raises(BarrierError, match=naming("worker 2", 2)):
            gatherings.arrive(body(num_workers=2), request(2, b"two"))
        answers = gatherings.arrive(body(num_workers=2), request(1, b"one"))
        assert [found(reply) for _, reply in answers] == [[(0, b"zero"), (1, b"one")]] * 2

    def test_closed_ones_are_kept_for_a_bounded_number_of_clients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_KEPT", 4)
        gatherings = Gatherings()
        for i in range(50):
            gatherings.arrive(body(), request(0, b"zero", client=2 * i))
            gatherings.arrive(body(), request(1, b"one", client=2 * i + 1))
            assert len(gatherings._kept) <= 4
        ((_, again),) = gatherings.arrive(body(), request(0, b"zero", client=98))
        assert found(again) == [(0, b"zero"), (1, b"one")]

    def test_a_worker_with_ever_new_clients_keeps_few_answers(self) -> None:
        gatherings = Gatherings()
        gatherings.arrive(body(num_workers=1), request(0, b"first", client=1))
        for client in range(100, 200):
            ask = request(0, b"zero", client=client)
            ask.message.worker = 3
            gatherings.arrive(GatherBody("own", 1, 1, 10.0, first=3), ask)
        assert len(gatherings._kept) == 1 + module.MAX_KEPT_OF_ONE
        ((_, again),) = gatherings.arrive(body(num_workers=1), request(0, b"first", client=1))
        assert found(again) == [(0, b"first")]


def packed(**fields: object) -> Array:
    return pack({"name": "g", "round": 1, "num_workers": 2, "timeout": 10.0, **fields})


def brought(data: bytes) -> Array:
    return Array(0, np.frombuffer(data, np.uint8))


class TestServer:
    """Through messages, by hand."""

    def test_all_get_all_in_one_reply_each(self, server: Server) -> None:
        talks = [Talk(server, client=i + 1, worker=i) for i in range(3)]
        for talk in talks[:2]:
            assert talk.send(talk.message(Command.GATHER, packed(num_workers=3), brought(b"%d" % talk.worker))) == []
        replies = talks[2].send(talks[2].message(Command.GATHER, packed(num_workers=3), brought(b"2")))
        assert sorted(reply.worker for reply in replies) == [0, 1, 2]
        for reply in replies:
            assert_ok(reply)
            assert found(reply.arrays) == [(0, b"0"), (1, b"1"), (2, b"2")]

    def test_a_time_out_that_got_lost_is_told_again(self, server: Server) -> None:
        talk = Talk(server)
        message, before = talk.message(Command.GATHER, packed(timeout=5.0), brought(b"x")), time.monotonic()
        assert talk.send(message) == []
        assert server.tick(before + 4) == []
        (_,) = server.tick(time.monotonic() + 6)
        replies = talk.send(message)
        assert replies, "the repeat waits for those who are missing, once more from the beginning"
        kind, text = refusal(replies[0])
        assert kind == "BarrierError"
        assert names(text, "worker 1", 2)

    def test_leaving_lets_the_others_go_without_its_bytes(self, server: Server) -> None:
        first, second = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        assert first.send(first.message(Command.GATHER, packed(), brought(b"zero"))) == []
        replies = {reply.command: reply for reply in second.send(second.message(Command.LEAVE))}
        assert found(replies[Command.GATHER].arrays) == [(0, b"zero")]

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
            {"num_workers": "two"},
            {"name": None},
            {"round": 1.5},
            {"extra": 1},
        ],
        ids=str,
    )
    def test_impossible_bodies_are_refused(self, server: Server, wrong: dict[str, object]) -> None:
        assert refusal(Talk(server).ask(Command.GATHER, packed(**wrong), brought(b"x")))[0] == "WireError"

    def test_a_request_without_data_or_with_garbage_is_refused(self, server: Server) -> None:
        talk = Talk(server)
        assert refusal(talk.ask(Command.GATHER))[0] == "WireError"
        assert refusal(talk.ask(Command.GATHER, packed()))[0] == "WireError"
        assert refusal(talk.ask(Command.GATHER, brought(b"\xff\xfe garbage"), brought(b"x")))[0] == "WireError"
        assert server.tick(time.monotonic() + 1000) == [], "a refused request waits somewhere"


@pytest.fixture(params=["in process", "tcp"])
def met_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    way = in_process(2) if request.param == "in process" else in_threads(endpoints("tcp", 2, tmp_path))
    with way as fleet:
        yield fleet


@pytest.fixture
def start() -> Iterator[Callable[..., Future]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def workers(fleet: Fleet, index: int, num: int, timeout: float = WAIT) -> Workers:
    return Workers(fleet.client(worker=index), index, num, timeout)


class TestWorkers:
    """Real threads, each with a client of its own."""

    def test_many_gatherings_one_after_another(self, met_fleet: Fleet, start: Callable[..., Future]) -> None:
        def work(index: int) -> None:
            with workers(met_fleet, index, 4) as own:
                for step in range(30):
                    expected = [bytes([i]) * (i * step) for i in range(4)]
                    assert own.gather("sizes", expected[index]) == expected

        for future in [start(work, i) for i in range(4)]:
            future.result(WAIT)

    def test_names_may_change_from_one_to_the_next(self, met_fleet: Fleet, start: Callable[..., Future]) -> None:
        def work(index: int) -> None:
            with workers(met_fleet, index, 3) as own:
                for step in range(10):
                    assert own.gather(f"name {step % 3}", b"%d %d" % (index, step)) == [
                        b"%d %d" % (i, step) for i in range(3)
                    ]

        for future in [start(work, i) for i in range(3)]:
            future.result(WAIT)

    def test_one_worker_alone_gets_its_own_bytes(self, met_fleet: Fleet) -> None:
        with workers(met_fleet, 0, 1) as own:
            assert own.gather("g", b"mine") == [b"mine"]
            assert own.gather("g", b"") == [b""]

    def test_megabytes_come_whole(self, met_fleet: Fleet, start: Callable[..., Future]) -> None:
        parts = [np.random.default_rng(i).bytes(3_000_000 + i) for i in range(2)]
        got = [start(workers(met_fleet, i, 2).gather, "big", parts[i]) for i in range(2)]
        for future in got:
            assert future.result(WAIT) == parts

    def test_too_much_is_refused_to_the_one_who_brings_it(self, met_fleet: Fleet) -> None:
        with (
            workers(met_fleet, 0, 2) as own,
            pytest.raises(TableError, match=naming(f"{module.MAX_BYTES + 1:,}", f"{module.MAX_BYTES:,}")),
        ):
            own.gather("g", bytes(module.MAX_BYTES + 1))

    def test_a_worker_that_leaves_is_left_out(self, met_fleet: Fleet, start: Callable[..., Future]) -> None:
        waiting = [start(workers(met_fleet, i, 3).gather, "g", b"%d" % i) for i in (0, 2)]
        time.sleep(0.2)
        assert not any(future.done() for future in waiting)
        met_fleet.client(worker=1, role=Role.LAUNCHER).leave()
        for future in waiting:
            assert future.result(WAIT) == [b"0", b"2"]

    def test_the_time_out_names_the_missing(self, met_fleet: Fleet, start: Callable[..., Future]) -> None:
        started = time.monotonic()
        waiting = [start(workers(met_fleet, i, 4, timeout=0.5).gather, "shuffle", b"") for i in (0, 2)]
        for future in waiting:
            with pytest.raises(BarrierError, match=naming("0.5", 1, 3, 4)):  # one may come when the other was told
                future.result(WAIT)
        assert time.monotonic() - started > 0.4

    def test_workers_that_disagree_about_their_number_are_told(
        self, met_fleet: Fleet, start: Callable[..., Future]
    ) -> None:
        first = start(workers(met_fleet, 0, 2).gather, "g", b"0")
        wait_until(lambda: met_fleet.num_requests > 0, WAIT, "request of worker 0")
        with pytest.raises(BarrierError, match=naming("'g'", 2, 3)):
            workers(met_fleet, 1, 3).gather("g", b"1")
        assert workers(met_fleet, 1, 2).gather("g", b"1") == [b"0", b"1"]
        assert first.result(WAIT) == [b"0", b"1"]

    def test_an_impossible_wait_is_refused(self, met_fleet: Fleet) -> None:
        with pytest.raises(FleetError, match="timeout"):
            workers(met_fleet, 0, 1, timeout=0).gather("g", b"")
