"""Threads of a cache that are closed: what they drop is an error for all who wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.messages import naming

from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.cache.cache_thread import CacheThread
from torchfleet.ps.worker.cache.write_back import Write, WriteBack

SOON = 60.0  # seconds; what takes longer hangs


class SlowClient:
    """The servers answer when the gate opens."""

    def __init__(self) -> None:
        self.is_asked, self.gate = threading.Event(), threading.Event()

    def __enter__(self) -> SlowClient:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def assign_rows(self, *given: Any) -> Future[None]:
        self.wait()
        answer = Future[None]()
        answer.set_result(None)
        return answer

    def wait(self) -> None:
        self.is_asked.set()
        assert self.gate.wait(SOON)


def check_raising_when_closed(client: SlowClient, waits: Callable[[], Any], close: Callable[[], None]) -> None:
    """`waits` raises an error as soon as `close` has begun."""
    with ThreadPoolExecutor(2) as threads:
        try:
            waiting = threads.submit(waits)
            assert client.is_asked.wait(SOON)
            closing = threads.submit(close)
            with pytest.raises(FleetError, match=naming("fleet.stop_worker()")):
                waiting.result(SOON)
        finally:
            client.gate.set()
        closing.result(SOON)


def write() -> Write:
    return Write("t", torch.tensor([1]), torch.ones(1, 2), None, 0)


def test_work_that_is_dropped_is_an_error_for_its_waiter() -> None:
    client: Any = SlowClient()
    thread = CacheThread(lambda: client)
    check_raising_when_closed(client, lambda: thread.run(lambda _: client.wait()), thread.close)
    with pytest.raises(FleetError, match=naming("fleet.stop_worker()")):
        thread.run(lambda client: None)
    with pytest.raises(FleetError, match=naming("fleet.stop_worker()")):
        thread.prepare(None, None)  # type: ignore[arg-type]


def test_a_write_that_is_dropped_is_an_error_for_its_waiter() -> None:
    client: Any = SlowClient()
    write_back, last = WriteBack(lambda: client), write()

    def give_and_wait() -> None:
        write_back.give(last)
        write_back.wait(last)

    check_raising_when_closed(client, give_and_wait, write_back.close)


def test_a_write_for_which_the_queue_has_no_room_is_an_error() -> None:
    client: Any = SlowClient()
    write_back = WriteBack(lambda: client)

    def give_for_ever() -> None:
        while True:
            write_back.give(write())

    check_raising_when_closed(client, give_for_ever, write_back.close)
