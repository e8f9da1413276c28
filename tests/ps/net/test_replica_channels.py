"""A client of a server with replicas follows the primary, whatever the others say."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torchfleet.base.errors import NotPrimary
from torchfleet.ps.net.replica_channels import SILENCE, ReplicaChannels, envelope_of
from torchfleet.ps.net.wire import (
    ERROR,
    OK,
    Command,
    Frame,
    Message,
    Reply,
    Role,
    decode,
    decode_reply,
    encode,
    encode_reply,
    error_arrays,
)

Answer = Callable[[Message], Reply | None]


class Replica:
    """A channel to one replica, which answers by a function, on a clock that only waiting moves."""

    clock = 0.0

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._inbox: deque[list[Frame]] = deque()

    def send(self, frames: Sequence[Frame]) -> bool:
        reply = self.answer(decode(frames))
        if reply is not None:
            self._inbox.append(encode_reply(reply))
        return True

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        if not self._inbox:
            Replica.clock += timeout
        return self._inbox.popleft() if self._inbox else None

    def reconnect(self) -> None:
        self._inbox.clear()

    def close(self) -> None:
        pass

    def now(self) -> float:
        return Replica.clock


def primary(term: int) -> Answer:
    return lambda asked: Reply(asked.command, OK, 0, 7, asked.call, term=term)


def backup(term: int) -> Answer:
    arrays = error_arrays(NotPrimary.__name__, "not now")
    return lambda asked: Reply(asked.command, ERROR, 0, 7, asked.call, arrays, term)


def silent(asked: Message) -> None:
    return None


def ask(channels: ReplicaChannels, timeout: float = 0.0) -> int | None:
    """The term of the answer to a request."""
    channels.send(encode(Message(Command.STATS, call=1)))
    frames = channels.receive(timeout)
    return None if frames is None else decode_reply(frames).term


def made(first: Answer, second: Answer) -> tuple[ReplicaChannels, Replica, Replica]:
    replicas = Replica(first), Replica(second)
    return ReplicaChannels(replicas, 0, Role.WORKER), *replicas


def test_one_that_refuses_is_left_at_once() -> None:
    channels, _, _ = made(backup(1), primary(2))
    before = Replica.clock
    assert ask(channels, 1.0) is None
    assert channels.take_move(), "what is under way must be sent again"
    assert not channels.take_move()
    assert ask(channels) == 2
    assert Replica.clock - before < SILENCE


def test_one_that_is_silent_is_left_when_another_answers() -> None:
    channels, first, second = made(primary(1), backup(1))
    assert ask(channels) == 1
    first.answer = silent
    assert ask(channels, 10 * SILENCE) is None
    assert not channels.take_move(), "nobody has taken over yet"
    second.answer = primary(2)
    before = Replica.clock
    assert ask(channels, 10 * SILENCE) is None
    assert channels.take_move()
    assert Replica.clock - before < 2 * SILENCE
    assert ask(channels) == 2


def test_requests_are_sent_again_to_a_later_process_of_the_same_replica() -> None:
    channels, first, _ = made(primary(1), silent)
    assert ask(channels) == 1
    first.answer = silent  # it is killed, with what was sent to it
    assert ask(channels, 10 * SILENCE) is None
    assert not channels.take_move()
    first.answer = primary(3)  # restored from its log
    assert channels.receive(10 * SILENCE) is None
    assert channels.take_move()
    assert ask(channels) == 3


def test_what_one_of_an_earlier_term_still_says_is_not_believed() -> None:
    channels, first, _ = made(backup(1), primary(3))
    ask(channels, 1.0)
    assert ask(channels) == 3
    channels._channels = [channels._channels[1], first]  # as if the old one stood where the client asks
    channels._current, first.answer = 1, primary(2)
    assert ask(channels) is None


def test_an_envelope_is_read_of_whole_headers_only() -> None:
    frames = encode(Message(Command.PUSH, Role.LAUNCHER, worker=3, call=5, shard=2, term=9))
    envelope = envelope_of(frames)
    assert envelope is not None
    assert (envelope.command, envelope.role, envelope.worker) == (Command.PUSH, Role.LAUNCHER, 3)
    assert (envelope.call, envelope.shard, envelope.term) == (5, 2, 9)
    assert envelope_of([bytes(frames[0])[:63]]) is None
    assert envelope_of([]) is None
