"""Requests under way to one server: sent again on schedule, bounded in number, ended in time. All on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import each_of
from support.lossy import Faults, LossyChannel, Network
from support.messages import names, naming

from torchfleet import errors
from torchfleet.base.errors import BarrierError, FleetError, ServerError, ServerUnreachable, TableError, WireError
from torchfleet.ps.net import wire
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import ERROR, Array, Command, Frame, Message, Role, decode, encode, error_arrays, pack
from torchfleet.ps.server.server import Server
from torchfleet.ps.worker.client.connection import Call, Connection, Patience


class Scripted:
    """A server that keeps what it is asked, and answers when and what the test says."""

    def __init__(self, answer: Callable[[Message], Message | None] = lambda asked: None) -> None:
        self.asked: list[Message] = []
        self.answer = answer

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> list[tuple[Peer, list[Frame]]]:
        message = decode(frames)
        self.asked.append(message)
        reply = self.answer(message)
        return [] if reply is None else [(peer, encode(reply))]

    def tick(self, now: float) -> list[tuple[Peer, list[Frame]]]:
        return []


def yes(asked: Message) -> Message:
    """A reply without an error; what was asked for in the flags comes back as an array."""
    return Message(
        asked.command, call=asked.call, role=0, client=1, arrays=[Array(0, np.full((1, 1), asked.flags, "f4"))]
    )


class Line:
    """A connection over a network without faults, and the server at its end."""

    def __init__(
        self,
        answer: Callable[[Message], Message | None] = lambda asked: None,
        patience: Patience | None = None,
        window: int = 8,
        faults: Faults | None = None,
    ) -> None:
        self.network = Network(1, faults or Faults())
        self.server = Scripted(answer)
        self.channel = self.network.connect(self.server)
        self.connection = Connection("server 3 (there)", self.channel, 5, Role.WORKER, patience or Patience(), window)

    def submit(self, command: Command = Command.PING, arrays: Sequence[Array] = (), **options: Any) -> Call:
        return self.connection.submit(command, list(arrays), **options)


class TestPatience:
    @pytest.mark.parametrize(
        ("patience", "times"),
        [
            (Patience(30, 3), [0, 2, 6, 14]),
            (Patience(30, 0), [0]),
            (Patience(30, 1), [0, 10]),
            (Patience(15.5, 4), [0, 0.5, 1.5, 3.5, 7.5]),
        ],
    )
    def test_a_request_is_sent_again_after_pauses_that_double(self, patience: Patience, times: list[float]) -> None:
        line = Line(patience=patience)
        with pytest.raises(ServerUnreachable):
            line.connection.wait(line.submit())
        assert line.channel.sent_at == pytest.approx(times)
        assert line.network.now == pytest.approx(patience.timeout)
        assert line.channel.num_reconnects == line.connection.num_retries == patience.retries

    @given(timeout=st.floats(0.001, 1e6), retries=st.integers(0, 20), sent=st.floats(0, 1e6))
    def test_the_schedule_rises_and_ends_at_the_time_out(self, timeout: float, retries: int, sent: float) -> None:
        patience = Patience(timeout, retries)
        times = [patience.resend_at(sent, attempt, timeout) for attempt in range(1, retries + 2)]
        assert times == sorted(times)
        assert all(sent <= time <= sent + timeout for time in times)
        assert times[-1] == sent + timeout

    def test_the_error_says_who_what_and_how_long(self) -> None:
        line = Line(patience=Patience(3, 2))
        with pytest.raises(ServerUnreachable) as caught:
            line.connection.wait(line.submit(Command.PULL))
        assert names(str(caught.value), "server 3 (there)", "PULL", 3)

    def test_a_request_can_have_a_time_out_of_its_own(self) -> None:
        line = Line(patience=Patience(3, 2))
        with pytest.raises(ServerUnreachable, match=naming("0.5")):
            line.connection.wait(line.submit(timeout=0.5))
        assert line.network.now == pytest.approx(0.5)

    def test_an_answer_to_the_last_attempt_counts(self) -> None:
        line = Line()
        line.server.answer = lambda asked: yes(asked) if line.network.now > 13 else None
        assert line.connection.wait(line.submit())
        assert line.network.now == pytest.approx(14)

    def test_a_channel_that_never_has_room_ends_in_the_time_out(self) -> None:
        line = Line(yes, faults=Faults(refuse=1.0))
        with pytest.raises(ServerUnreachable):
            line.connection.wait(line.submit())
        assert line.network.now == pytest.approx(30)
        assert line.server.asked == []

    def test_a_channel_that_has_room_later_is_used_then(self) -> None:
        line = Line(yes, faults=Faults(refuse=0.9, delay=0.001), patience=Patience(1000, 10))
        for flags in range(20):
            assert line.connection.wait(line.submit(flags=flags))[0].data == flags

    def test_one_late_answer_brings_a_new_connection_and_all_requests_again(self) -> None:
        line = Line(yes)
        line.server.answer = lambda asked: yes(asked) if line.channel.num_reconnects else None
        calls = [line.submit(flags=i) for i in range(5)]
        for i, call in enumerate(calls):
            assert line.connection.wait(call)[0].data == i
        assert [asked.flags for asked in line.server.asked] == [0, 1, 2, 3, 4] * 2
        assert line.channel.num_reconnects == 1


class TestLongWaits:
    """A wait that other workers may make long: only a server that is silent ends it before its time."""

    def test_a_server_that_is_gone_is_noticed_long_before_the_end(self) -> None:
        line = Line(patience=Patience(10, 3))
        with pytest.raises(ServerUnreachable, match=naming("server 3 (there)")):
            line.connection.wait(line.submit(Command.BARRIER, timeout=10_000))
        assert line.network.now < 30

    def test_a_server_that_is_there_may_take_its_time(self) -> None:
        line = Line(patience=Patience(10, 3))
        line.server.answer = lambda asked: (
            yes(asked) if asked.command == Command.PING or line.network.now > 900 else None
        )
        line.connection.wait(line.submit(Command.BARRIER, timeout=10_000))
        assert line.network.now > 900
        assert sum(asked.command == Command.PING for asked in line.server.asked) < 900


class TestWindow:
    @pytest.mark.parametrize("window", [1, 3, 8])
    def test_no_more_requests_are_under_way_than_it_allows(self, window: int) -> None:
        line = Line(window=window)
        most = 0

        def answer_the_oldest_when_full(asked: Message) -> Message | None:
            nonlocal most
            waiting.append(asked)
            most = max(most, len(waiting))
            return yes(waiting.pop(0)) if len(waiting) == window else None

        waiting: list[Message] = []
        line.server.answer = answer_the_oldest_when_full
        calls = [line.submit(flags=i) for i in range(20)]
        assert most == window
        assert sum(call.is_done for call in calls) >= 20 - window

    def test_one_more_waits_for_the_oldest_to_be_given_up(self) -> None:
        line = Line(window=2, patience=Patience(5, 1))
        first, second = line.submit(), line.submit()
        third = line.submit()
        assert isinstance(first.error, ServerUnreachable)
        assert line.network.now == pytest.approx(5)
        with pytest.raises(ServerUnreachable):
            line.connection.wait(third)
        assert second.is_done
        assert line.network.now == pytest.approx(10)

    def test_answers_find_their_requests_in_any_order(self) -> None:
        line = Line(yes, faults=Faults(delay=1.0))
        calls = [line.submit(flags=i) for i in range(8)]
        assert [int(line.connection.wait(call)[0].data[0, 0]) for call in reversed(calls)] == list(range(8))[::-1]

    def test_an_answer_after_the_end_of_its_request_is_passed_over(self) -> None:
        line = Line(patience=Patience(1, 0))
        call = line.submit()
        with pytest.raises(ServerUnreachable):
            line.connection.wait(call)
        line.server.answer = lambda asked: yes(line.server.asked[0])
        other = line.submit()
        with pytest.raises(ServerUnreachable):
            line.connection.wait(other)
        assert isinstance(call.error, ServerUnreachable)


class TestNumbers:
    def test_changes_are_numbered_and_other_requests_are_not(self) -> None:
        line = Line(yes)
        for once in (True, False, True, True, False):
            line.connection.wait(line.submit(once=once))
        assert [asked.sequence for asked in line.server.asked] == [1, 0, 2, 3, 0]
        assert len({asked.call for asked in line.server.asked}) == 5
        assert {asked.worker for asked in line.server.asked} == {5}

    def test_a_repeat_keeps_its_numbers(self) -> None:
        line = Line(patience=Patience(30, 3))
        with pytest.raises(ServerUnreachable):
            line.connection.wait(line.submit(once=True))
        assert len({(asked.client, asked.call, asked.sequence) for asked in line.server.asked}) == 1
        assert len(line.server.asked) == 4

    def test_two_connections_are_two_clients(self) -> None:
        lines = [Line(yes), Line(yes)]
        for line in lines:
            line.connection.wait(line.submit())
        assert lines[0].server.asked[0].client != lines[1].server.asked[0].client

    def test_the_floor_is_the_oldest_change_without_an_answer(self) -> None:
        line = Line()
        line.server.answer = lambda asked: yes(asked) if asked.sequence != 2 or line.channel.num_reconnects else None
        calls = [line.submit(once=True) for _ in range(3)]
        for call in (calls[0], calls[2]):
            line.connection.wait(call)
        line.connection.wait(line.submit(once=True))
        assert line.server.asked[-1].floor == 2
        line.connection.wait(calls[1])
        line.connection.wait(line.submit(once=True))
        assert line.server.asked[-1].floor == line.server.asked[-1].sequence == 5

    def test_a_change_that_was_given_up_does_not_hold_the_floor(self) -> None:
        line = Line(patience=Patience(1, 0))
        with pytest.raises(ServerUnreachable):
            line.connection.wait(line.submit(once=True))
        line.server.answer = yes
        line.connection.wait(line.submit(once=True))
        assert line.server.asked[-1].floor == 2


class TestErrors:
    @staticmethod
    def line_with(kind: str, text: str = "so it is") -> Line:
        return Line(
            lambda asked: Message(asked.command, ERROR, call=asked.call, client=1, arrays=error_arrays(kind, text))
        )

    @pytest.mark.parametrize("kind", [TableError, BarrierError, WireError, FleetError], ids=lambda kind: kind.__name__)
    def test_an_error_has_the_class_it_had_on_the_server(self, kind: type[FleetError]) -> None:
        line = self.line_with(kind.__name__)
        with pytest.raises(kind) as caught:
            line.connection.wait(line.submit(Command.PUSH))
        assert type(caught.value) is kind
        assert names(str(caught.value), "server 3 (there)", "PUSH", "so it is")

    @each_of("kind", ["SystemExit", "annotations", "__name__", "", "x" * 1000, "FleetErrors"])
    def test_a_class_that_is_not_ours_becomes_a_server_error(self, kind: str) -> None:
        line = self.line_with(kind)
        with pytest.raises(ServerError):
            line.connection.wait(line.submit())

    def test_every_error_of_ours_can_come_back(self) -> None:
        ours = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FleetError)]
        for kind in ours:
            line = self.line_with(kind.__name__)
            with pytest.raises(kind):
                line.connection.wait(line.submit())

    @each_of(
        "arrays",
        [
            [],
            [Array(0, np.zeros((2, 2), np.float32))],
            [Array(0, np.full((3, 1), 0xC1, np.uint8))],
            [pack([1, 2])],
            [pack({})],
        ],
        ids=["none", "floats", "garbage", "a list", "an empty one"],
    )
    def test_an_error_that_cannot_be_read_still_ends_its_request(self, arrays: list[Array]) -> None:
        """Taken in while another request is waited for: it must not be lost, or its caller waits for ever."""
        line = Line()
        broken = line.submit(Command.PUSH)
        line.server.answer = lambda asked: Message(Command.PUSH, ERROR, call=broken.number, client=1, arrays=arrays)
        other = line.submit(Command.PULL)
        with pytest.raises(FleetError):
            line.connection.wait(other)
        assert broken.is_done
        with pytest.raises(FleetError):
            line.connection.wait(broken)

    @pytest.mark.parametrize("version", [1, wire.VERSION + 1])
    def test_a_server_of_another_version_ends_the_request_with_both_versions(
        self, version: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line = Line(yes)
        call = line.submit(Command.PUSH)
        with monkeypatch.context() as patch:
            patch.setattr(wire, "VERSION", version)  # of the reply, which is written here
            (reply,) = encode(Message(Command.PUSH, call=call.number, client=1))
        line.connection._take([reply])
        with pytest.raises(WireError, match=rf"server 3 .*{wire.VERSION}.*{version}"):
            line.connection.wait(call)
        assert line.channel.sent_at == [0.0]

    def test_a_request_that_cannot_be_encoded_is_out_of_the_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        line = Line(yes, faults=Faults(delay=3.0), patience=Patience(30, 3))
        with monkeypatch.context() as patch:
            patch.setattr(wire, "MAX_FRAME", 10)
            with pytest.raises(WireError, match=naming(10)):
                line.submit(Command.PUSH, [Array(1, np.ones((10, 1), np.float32))], once=True)
            for flags in range(5):  # these take long enough for whatever is left to be sent again
                assert line.connection.wait(line.submit(flags=flags))[0].data == flags
        line.connection.wait(line.submit(once=True))
        assert line.server.asked[-1].floor == line.server.asked[-1].sequence

    def test_a_request_that_is_waited_for_after_the_end_of_its_connection_ends(self) -> None:
        line = Line()
        call = line.submit()
        line.connection.close()
        receive, left = line.channel.receive, iter(range(1000))

        def receive_a_thousand_times(timeout: float) -> list[bytes] | None:
            if next(left, None) is None:
                pytest.fail("it waits for ever")
            return receive(timeout)

        line.channel.receive = receive_a_thousand_times
        with pytest.raises(FleetError):
            line.connection.wait(call)


class Suspended(LossyChannel):
    """The process sleeps for a while (SIGSTOP, a laptop's lid) in the middle of its first wait, and its connection with
    it: the answer is lost."""

    seconds = 45.0

    def receive(self, timeout: float) -> list[bytes] | None:
        if self.seconds:
            self._network.now += self.seconds
            self.seconds = 0.0
            self._inbox.clear()
            return None
        return super().receive(timeout)


@pytest.mark.parametrize("seconds", [33.0, 45.0, 3600.0])
def test_a_suspended_client_does_not_count_its_sleep_as_the_servers_silence(seconds: float) -> None:
    network = Network(1, Faults(delay=0.01))
    channel = Suspended(network, Server(1 << 20))
    channel.seconds = seconds
    connection = Connection("s", channel, 0, Role.LAUNCHER, Patience(30.0, 3), 8)
    started = network.now
    assert connection.wait(connection.submit(Command.PING, [])) == []
    assert network.now - started < seconds + 10


def test_a_server_that_stays_silent_after_the_sleep_is_given_up_in_time() -> None:
    network = Network(1, Faults(lose=1.0))
    channel = Suspended(network, Server(1 << 20))
    connection = Connection("s", channel, 0, Role.LAUNCHER, Patience(30.0, 3), 8)
    started = network.now
    with pytest.raises(ServerUnreachable):
        connection.wait(connection.submit(Command.PING, []))
    assert 45 + 25 < network.now - started < 45 + 40
