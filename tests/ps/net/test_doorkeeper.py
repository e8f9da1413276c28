"""A connection is ended only if ZeroMQ had the time to deliver its message, and the server to receive it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from torchfleet.ps.net import doorkeeper
from torchfleet.ps.net.doorkeeper import GRACE, MAX_FIRST, Doorkeeper


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    made = context.socket(zmq.ROUTER)
    yield made
    made.close(linger=0)
    context.term()


@pytest.fixture
def keeper(router: zmq.Socket[bytes]) -> Iterator[Doorkeeper]:
    made = Doorkeeper(router, "tcp://127.0.0.1:0")
    router.bind("tcp://127.0.0.1:0")
    listening = made.listening()
    assert listening is not None
    yield made
    made.close()
    listening.close()


def wait_for_bytes(keeper: Doorkeeper, num: int) -> None:
    """Until the kernel has received `num` bytes of the only connection."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        keeper._follow_events(0.0)
        if any(doorkeeper._received(number) > num for number in keeper._doors):
            return
        time.sleep(0.01)
    raise AssertionError("nothing arrived")


def test_a_client_that_connects_again_with_a_large_request_is_not_refused_by_a_busy_server(
    router: zmq.Socket[bytes], keeper: Doorkeeper
) -> None:
    client = router.context.socket(zmq.DEALER)
    client.connect(router.get_string(zmq.LAST_ENDPOINT))
    client.send(b"")
    client.send(bytes(8 * MAX_FIRST))
    try:
        wait_for_bytes(keeper, 8 * MAX_FIRST)
        keeper.look(0.0)
        keeper.rest()  # ZeroMQ's thread had not delivered the message yet
        keeper.look(5.0)  # after five seconds of work: the message is in the queue, and was not received
        for now in (6.0, 7.0):
            keeper.note(router.recv_multipart(copy=False)[-1])
            keeper.rest()
            keeper.look(now)
        assert keeper.news == []
        assert [door.is_known for door in keeper._doors.values()] == [True]
    finally:
        client.close(linger=0)


def test_a_connection_without_a_message_is_ended_at_the_third_look(
    router: zmq.Socket[bytes], keeper: Doorkeeper
) -> None:
    client = router.context.socket(zmq.DEALER)
    client.connect(router.get_string(zmq.LAST_ENDPOINT))
    client.send(bytes(8 * MAX_FIRST))  # to the doorkeeper, a message that is never complete
    try:
        wait_for_bytes(keeper, 8 * MAX_FIRST)
        for now, is_open in ((0.0, True), (GRACE / 2, True), (GRACE, True), (2 * GRACE, False)):
            keeper.look(now)
            keeper.rest()
            assert bool(keeper._doors) == is_open, now
        assert len(keeper.news) == 1
    finally:
        client.close(linger=0)
