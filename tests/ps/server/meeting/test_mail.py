"""Parcels from worker to worker: none lost, doubled or out of order, however often messages are repeated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fleets import Fleet, Talk, assert_ok, in_process, refusal
from support.searches import examples

from torchfleet.ps.net.wire import Array, Command, pack
from torchfleet.ps.server.meeting import mail as module
from torchfleet.ps.server.meeting.mail import Mail, SendBody, TakeBody
from torchfleet.ps.server.server import Server


def parcel(data: bytes, *more: bytes) -> list[Array]:
    return [Array(0, np.frombuffer(part, np.uint8)) for part in (data, *more)]


def contents(taken: list[tuple[int, list[Array]]]) -> list[bytes]:
    return [b"|".join(array.data.tobytes() for array in arrays) for _, arrays in taken]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    monkeypatch.setattr(module, "MAX_TAKEN", 30)
    monkeypatch.setattr(module, "MAX_TOPICS", 3)


class TestMail:
    def test_what_is_sent_is_taken_in_the_order_of_sending(self) -> None:
        mail = Mail()
        for number in range(1, 6):
            for sender in (0, 1):
                assert mail.send(sender, SendBody("t", 2, number), parcel(b"%d from %d" % (number, sender)))
        expected = [b"%d from %d" % (number, sender) for number in range(1, 6) for sender in (0, 1)]
        taken = mail.take(2, TakeBody("t", 0))
        assert contents(taken) == expected
        assert [number for number, _ in taken] == list(range(1, 11))

    def test_it_is_there_until_it_is_acknowledged_and_gone_then(self) -> None:
        mail = Mail()
        mail.send(0, SendBody("t", 1, 1), parcel(b"first"))
        mail.send(0, SendBody("t", 1, 2), parcel(b"second"))
        for _ in range(3):
            assert contents(mail.take(1, TakeBody("t", 0))) == [b"first", b"second"]
        assert contents(mail.take(1, TakeBody("t", 1))) == [b"second"]
        assert contents(mail.take(1, TakeBody("t", 0))) == [b"second"]
        assert mail.take(1, TakeBody("t", 2)) == []
        assert mail.num_bytes == 0

    def test_a_repeated_parcel_is_kept_once_before_and_after_it_was_taken(self) -> None:
        mail = Mail()
        for _ in range(3):
            assert mail.send(0, SendBody("t", 1, 1), parcel(b"x"))
        assert contents(mail.take(1, TakeBody("t", 0))) == [b"x"]
        mail.take(1, TakeBody("t", 1))
        assert mail.send(0, SendBody("t", 1, 1), parcel(b"x"))
        assert mail.take(1, TakeBody("t", 1)) == []
        assert mail.num_bytes == 0

    def test_ways_and_topics_are_numbered_each_for_itself(self) -> None:
        mail = Mail()
        for topic in ("a", "b"):
            for sender in (0, 1):
                for to in (0, 1):
                    assert mail.send(sender, SendBody(topic, to, 1), parcel(f"{topic}{sender}{to}".encode()))
        for topic in ("a", "b"):
            for to in (0, 1):
                taken = contents(mail.take(to, TakeBody(topic, 0)))
                assert taken == [f"{topic}0{to}".encode(), f"{topic}1{to}".encode()]

    def test_all_arrays_of_a_parcel_keep_shape_and_dtype(self) -> None:
        mail = Mail()
        arrays = [np.ones((2, 3), np.float32), np.arange(4, dtype=np.uint64), np.empty(0, np.uint8)]
        mail.send(0, SendBody("t", 1, 1), [Array(9, array) for array in arrays])
        ((_, found),) = mail.take(1, TakeBody("t", 0))
        for array, sent in zip(found, arrays, strict=True):
            assert array.data.dtype == sent.dtype
            assert np.array_equal(array.data, sent)

    def test_the_memory_of_the_message_may_change_afterwards(self) -> None:
        mail, data = Mail(), np.arange(5, dtype=np.uint64)
        mail.send(0, SendBody("t", 1, 1), [Array(0, data)])
        data[:] = 99
        ((_, (array,)),) = mail.take(1, TakeBody("t", 0))
        assert array.data.tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.usefixtures("small")
    def test_a_full_box_refuses_until_something_is_acknowledged(self) -> None:
        mail = Mail()
        assert mail.send(0, SendBody("t", 1, 1), parcel(bytes(60)))
        assert mail.send(0, SendBody("t", 1, 2), parcel(bytes(40)))
        for _ in range(3):
            assert not mail.send(0, SendBody("t", 1, 3), parcel(b"y"))
            assert not mail.send(1, SendBody("u", 2, 1), parcel(b"z"))
        assert mail.send(0, SendBody("t", 1, 2), parcel(bytes(40))), "a repeat needs no room"
        assert len(mail.take(1, TakeBody("t", 0))) == 1
        assert not mail.send(0, SendBody("t", 1, 3), parcel(b"y")), "what was taken may be asked for again"
        mail.take(1, TakeBody("t", 1))
        assert mail.send(0, SendBody("t", 1, 3), parcel(b"y"))
        assert contents(mail.take(1, TakeBody("t", 2))) == [b"y"]

    @pytest.mark.usefixtures("small")
    def test_a_parcel_larger_than_all_the_room_goes_when_there_is_nothing_else(self) -> None:
        mail = Mail()
        assert mail.send(0, SendBody("t", 1, 1), parcel(bytes(1000)))
        assert not mail.send(0, SendBody("t", 1, 2), parcel(b"x"))
        assert [len(data) for data in contents(mail.take(1, TakeBody("t", 0)))] == [1000]

    @pytest.mark.usefixtures("small")
    def test_one_reply_is_bounded_but_holds_at_least_one_parcel(self) -> None:
        mail = Mail()
        for number, size in enumerate((50, 10, 10, 10, 5), start=1):
            assert mail.send(0, SendBody("t", 1, number), parcel(bytes(size)))
        assert [number for number, _ in mail.take(1, TakeBody("t", 0))] == [1]
        assert [number for number, _ in mail.take(1, TakeBody("t", 1))] == [2, 3, 4]
        assert [number for number, _ in mail.take(1, TakeBody("t", 4))] == [5]

    @pytest.mark.usefixtures("small")
    def test_the_oldest_topic_is_dropped_with_its_bytes(self) -> None:
        mail = Mail()
        for topic in ("a", "b", "c"):
            assert mail.send(0, SendBody(topic, 1, 1), parcel(bytes(20)))
        assert mail.num_bytes == 60
        assert mail.send(0, SendBody("d", 1, 1), parcel(bytes(20)))
        assert mail.num_bytes == 60
        for topic in ("b", "c", "d"):
            assert len(mail.take(1, TakeBody(topic, 0))) == 1
        assert mail.take(1, TakeBody("a", 0)) == []

    @pytest.mark.usefixtures("small")
    def test_a_new_exchange_finds_room_although_an_old_one_was_given_up_with_the_box_full(self) -> None:
        mail = Mail()
        assert mail.send(0, SendBody("given up", 1, 1), parcel(bytes(100)))
        taken = []
        for i in range(5):  # as five exchanges, one after another
            topic = f"exchange {i}"
            if mail.send(0, SendBody(topic, 1, 1), parcel(b"news")):
                taken += contents(mail.take(1, TakeBody(topic, 0)))
                mail.take(1, TakeBody(topic, 1))
        assert taken, "what nobody will ever take keeps everybody else out"

    def test_a_worker_may_take_before_anything_was_sent(self) -> None:
        mail = Mail()
        assert mail.take(1, TakeBody("t", 0)) == []
        mail.send(0, SendBody("t", 1, 1), parcel(b"x"))
        assert contents(mail.take(1, TakeBody("t", 0))) == [b"x"]

    def test_empty_parcels_do_not_fill_the_memory_without_end(self) -> None:
        """They have no bytes, but each takes a few hundred of the server's."""
        mail = Mail()
        accepted = (mail.send(0, SendBody("t", 1, number), parcel(b"")) for number in range(1, 200_001))
        assert not all(accepted)

    def test_empty_arrays_do_not_fill_the_memory_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_KEPT", 1000)
        monkeypatch.setattr(module, "MAX_KEPT_OF_ONE", 500)
        mail = Mail()
        num_kept = sum(mail.send(0, SendBody("t", 1, number), parcel(*[b""] * 99)) for number in range(1, 20))
        assert num_kept == 5
        assert mail.send(2, SendBody("t", 1, 1), parcel(b"x")), "another sender has room"
        mail.take(1, TakeBody("t", 1))
        assert mail.send(0, SendBody("t", 1, 6), parcel(b"y"))


class MailMachine(RuleBasedStateMachine):
    """Mail against plain dicts and lists: per topic and receiver, what was accepted, in order."""

    TOPICS, WORKERS = ("a", "b"), (0, 1, 2)

    @initialize(max_bytes=st.integers(0, 60), max_taken=st.integers(0, 40))
    def begin(self, max_bytes: int, max_taken: int) -> None:
        self._before = module.MAX_BYTES, module.MAX_TAKEN
        module.MAX_BYTES, module.MAX_TAKEN = max_bytes, max_taken
        self.mail = Mail()
        self.accepted: dict[tuple[str, int], list[bytes]] = {}
        self.received: dict[tuple[str, int], list[bytes]] = {}
        self.acknowledged: dict[tuple[str, int], int] = {}
        self.sent: dict[tuple[str, int, int], list[bytes]] = {}
        self.old_takes: list[tuple[int, TakeBody]] = []

    @rule(topic=st.sampled_from(TOPICS), sender=st.sampled_from(WORKERS), to=st.sampled_from(WORKERS), data=st.data())
    def send(self, topic: str, sender: int, to: int, data: st.DataObject) -> None:
        way = self.sent.setdefault((topic, sender, to), [])
        payload = data.draw(st.binary(max_size=20))
        number = len(way) + 1
        waiting = self._waiting()
        found = self.mail.send(sender, SendBody(topic, to, number), parcel(payload))
        assert found == (waiting == 0 or waiting + len(payload) <= module.MAX_BYTES)
        if found:
            way.append(payload)
            self.accepted.setdefault((topic, to), []).append(payload)

    @precondition(lambda self: any(self.sent.values()))
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        topic, sender, to = data.draw(st.sampled_from(sorted(key for key, way in self.sent.items() if way)))
        way = self.sent[topic, sender, to]
        number = data.draw(st.integers(1, len(way)))
        assert self.mail.send(sender, SendBody(topic, to, number), parcel(way[number - 1]))

    @rule(topic=st.sampled_from(TOPICS), worker=st.sampled_from(WORKERS), is_lost=st.booleans())
    def take(self, topic: str, worker: int, is_lost: bool) -> None:
        got = self.received.setdefault((topic, worker), [])
        body = TakeBody(topic, len(got))
        self.old_takes.append((worker, body))
        taken = self.mail.take(worker, body)
        self.acknowledged[topic, worker] = len(got)
        expected = self.accepted.get((topic, worker), [])
        assert bool(taken) == (len(expected) > len(got))
        assert [number for number, _ in taken] == list(range(len(got) + 1, len(got) + 1 + len(taken)))
        assert contents(taken) == expected[len(got) : len(got) + len(taken)]
        sizes = [len(data) for data in contents(taken)]
        assert len(sizes) <= 1 or sum(sizes) <= module.MAX_TAKEN
        if not is_lost:
            got += contents(taken)

    @precondition(lambda self: self.old_takes)
    @rule(data=st.data())
    def take_again(self, data: st.DataObject) -> None:
        """A copy of an old request comes late: its client has gone on, and nothing may change."""
        worker, body = data.draw(st.sampled_from(self.old_takes))
        before = self.mail.num_bytes
        self.mail.take(worker, body)
        assert self.mail.num_bytes == before

    @invariant()
    def bytes_are_counted(self) -> None:
        if hasattr(self, "mail"):
            assert self.mail.num_bytes == self._waiting()

    def _waiting(self) -> int:
        return sum(
            len(data)
            for place, accepted in self.accepted.items()
            for data in accepted[self.acknowledged.get(place, 0) :]
        )

    def teardown(self) -> None:
        if not hasattr(self, "mail"):
            return
        for (topic, worker), expected in self.accepted.items():
            got = self.received.setdefault((topic, worker), [])
            while taken := self.mail.take(worker, TakeBody(topic, len(got))):
                got += contents(taken)
            assert got == expected
        assert self.mail.num_bytes == 0
        module.MAX_BYTES, module.MAX_TAKEN = self._before


TestMailMachine = MailMachine.TestCase
TestMailMachine.settings = settings(max_examples=examples(20), stateful_step_count=40)


def to(worker: int, number: int, topic: str = "t") -> Array:
    return pack({"topic": topic, "to": worker, "number": number})


class TestServer:
    """Through messages, by hand."""

    @pytest.mark.parametrize("num", [2000, 2048, 2049, 5000])
    def test_thousands_of_small_parcels_are_taken_one_way_or_another(self, server: Server, num: int) -> None:
        """A message holds 4,096 arrays at most."""
        sender, receiver = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        for number in range(1, num + 1):
            assert_ok(sender.ask(Command.SEND, to(1, number), Array(0, np.array([number], np.uint64))))
        values: list[int] = []
        for _ in range(num):
            reply = receiver.ask(Command.TAKE, pack({"topic": "t", "received": len(values)}))
            assert_ok(reply)
            if not reply.arrays:
                break
            values += [int(array.data[0, 0]) for array in reply.arrays[1::2]]
        assert values == list(range(1, num + 1))

    def test_a_parcel_of_as_many_arrays_as_a_message_holds_comes_back_whole(self, server: Server) -> None:
        sender, receiver = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        arrays = [Array(0, np.array([i], np.uint64)) for i in range(4095)]
        assert_ok(sender.ask(Command.SEND, to(1, 1), *arrays))
        reply = receiver.ask(Command.TAKE, pack({"topic": "t", "received": 0}))
        assert_ok(reply)
        assert [int(array.data[0, 0]) for array in reply.arrays[1:]] == list(range(4095))

    @pytest.mark.parametrize(
        "arrays",
        [
            [],
            [to(1, 1)],
            [Array(0, np.frombuffer(b"\xc1garbage", np.uint8)), Array(0, np.zeros(1, np.uint64))],
            [pack({"topic": "t", "to": "you", "number": 1}), Array(0, np.zeros(1, np.uint64))],
            [pack({"topic": "t", "to": 1}), Array(0, np.zeros(1, np.uint64))],
            [pack({"topic": "t", "to": 1, "number": 1, "more": 2}), Array(0, np.zeros(1, np.uint64))],
        ],
        ids=["nothing", "no parcel", "garbage", "wrong type", "no number", "unknown field"],
    )
    def test_malformed_requests_are_refused_and_keep_nothing(self, server: Server, arrays: list[Array]) -> None:
        talk = Talk(server)
        assert refusal(talk.ask(Command.SEND, *arrays))[0] == "WireError"
        assert refusal(talk.ask(Command.TAKE, *arrays[:1], *arrays[:1]))[0] == "WireError"
        assert server.state.meetings.mail.num_bytes == 0

    def test_a_sender_that_is_none_of_the_workers_is_refused(self) -> None:
        server = Server(max_table_bytes=1 << 20, num_workers=2)
        talk = Talk(server, worker=2)
        assert refusal(talk.ask(Command.SEND, to(1, 1), Array(0, np.zeros(1, np.uint64))))[0] == "WireError"
        assert refusal(talk.ask(Command.TAKE, pack({"topic": "t", "received": 0})))[0] == "WireError"

    @pytest.mark.parametrize("receiver", [2, -1, 1 << 40])
    def test_a_receiver_that_is_none_of_the_workers_is_refused(self, receiver: int) -> None:
        """No worker will ever take it: it would stand in the way of everything else."""
        server = Server(max_table_bytes=1 << 20, num_workers=2)
        reply = Talk(server, worker=0).ask(Command.SEND, to(receiver, 1), Array(0, np.zeros(1, np.uint64)))
        assert refusal(reply)[0] == "WireError"
        assert server.state.meetings.mail.num_bytes == 0


@pytest.fixture(params=[1, 2, 3])
def servers(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with in_process(request.param) as fleet:
        yield fleet


class TestClient:
    def test_parcels_find_their_receiver_on_any_number_of_servers(self, servers: Fleet) -> None:
        clients = [servers.client(worker=i) for i in range(5)]
        rng = np.random.default_rng(0)
        sent: dict[int, list[npt.NDArray[np.float32]]] = {i: [] for i in range(5)}
        for number in range(1, 4):
            for sender in range(5):
                for receiver in range(5):
                    block = rng.normal(size=(sender, number)).astype(np.float32)
                    assert clients[sender].send("t", receiver, number, [Array(0, block)])
                    sent[receiver].append(block)
        for receiver in range(5):
            taken = clients[receiver].take("t", receiver, 0)
            assert [number for number, _ in taken] == list(range(1, 16))
            for (_, (found,)), expected in zip(taken, sent[receiver], strict=True):
                assert np.array_equal(found, expected)
            assert clients[receiver].take("t", receiver, 15) == []
        assert sum(server.state.meetings.mail.num_bytes for server in servers.servers) == 0
