"""The line between a simulated process and the coordinator: a message waits until the other end takes it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchfleet.launch.simulate import packets
from torchfleet.launch.simulate.packets import GRANT, Line, LineClosed, Turn, packet

TURN = Turn(GRANT, 2.0, packets=[packet((1, 0), (0, 0), 1.0, [bytes([i]) * 5000, b"end"]) for i in range(200)])


@contextlib.contextmanager
def two_ends(
    monkeypatch: pytest.MonkeyPatch, on_silence: Callable[[socket.socket], None]
) -> Iterator[tuple[Line, socket.socket]]:
    """A line whose socket takes far less than TURN at once, and the other end, which `on_silence` is called with."""
    monkeypatch.setattr(packets, "_SILENCE", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield Line(ours, lambda: on_silence(theirs)), theirs


def test_a_message_that_the_other_end_takes_late_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    is_late = threading.Event()
    with two_ends(monkeypatch, lambda _: is_late.set()) as (line, theirs), ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: is_late.wait(60) and Line(theirs).receive())
        line.send(TURN)
        turn = taken.result(60)
    assert turn
    assert [packet.sizes for packet in turn.packets] == [packet.sizes for packet in TURN.packets]
    assert [bytes(packet.body) for packet in turn.packets] == [packet.body for packet in TURN.packets]


def test_a_message_to_an_end_that_closes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends(monkeypatch, socket.socket.close) as (line, _), pytest.raises(LineClosed):
        line.send(TURN)


def test_a_sender_stops_waiting_when_its_watch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(_: socket.socket) -> None:
        raise InterruptedError

    with two_ends(monkeypatch, give_up) as (line, _), pytest.raises(InterruptedError):
        line.send(TURN)
