"""The end of a server: a worker that was not answered in time asks again, and is answered."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from support import jobs

from torchfleet.api.job.worker_start import wait_for_servers
from torchfleet.ps.net.wire import Command, Frame, Role, decode
from torchfleet.ps.server.job import farewell
from torchfleet.ps.server.job.farewell import SLOW, STAYS, Farewell
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

BODY = {"host": "h", "pid": 1, "num_workers": 1, "timeout": 60.0, "sync_timeout": 60.0}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(farewell.time, "monotonic", lambda: self.now)

    def after(self, seconds: float, made: Farewell, is_stopping: bool) -> bool:
        self.now += seconds
        return made.is_over(is_stopping)


def test_a_server_that_was_never_slow_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(monkeypatch), Farewell()
    assert not clock.after(0.9 * SLOW, made, False)
    assert clock.after(0.9 * SLOW, made, True)


@pytest.mark.parametrize("turns", [[2 * SLOW], [2 * SLOW, 0.01, 0.01]], ids=["in the last turn", "some turns before"])
def test_a_server_that_was_slow_stays_for_a_moment_however_slow_it_is_then(
    monkeypatch: pytest.MonkeyPatch, turns: list[float]
) -> None:
    clock, made = Clock(monkeypatch), Farewell()
    for seconds in turns[:-1]:
        assert not clock.after(seconds, made, False)
    assert not clock.after(turns[-1], made, True)
    assert not clock.after(0.9 * STAYS, made, True)
    assert clock.after(0.2 * STAYS, made, True)


def test_a_server_whose_slowness_is_long_ago_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(monkeypatch), Farewell()
    assert not clock.after(2 * SLOW, made, False)
    for _ in range(round(STAYS / SLOW) + 2):
        assert not clock.after(0.9 * SLOW, made, False)
    assert clock.after(0.01, made, True)


@pytest.mark.slow
def test_the_last_worker_leaves_without_an_error_although_its_server_was_slow() -> None:
    """The server takes longer for LEAVE than the worker waits before it connects anew and asks again."""
    servers = jobs.SocketServers(jobs.Net, jobs.sgd, 1, 1)
    server, is_first = servers._jobs[0]._server, threading.Event()
    handle, leaving = server.handle, list[Client]()

    def slowly(peer: Any, frames: Sequence[Frame], role: Role | None) -> Any:
        if not is_first.is_set() and decode(frames).command == Command.LEAVE:
            is_first.set()
            jobs.wait_until(lambda: bool(leaving[0].num_retries), "the worker asks again")
        return handle(peer, frames, role)

    server.handle = slowly  # type: ignore[method-assign]
    servers.start()
    try:
        with Client.connect([f"tcp://{servers.endpoints[0]}"], patience=Patience(jobs.SECONDS, 3)) as starting:
            wait_for_servers(starting, jobs.SECONDS)
        with Client.connect([f"tcp://{servers.endpoints[0]}"], patience=Patience(30.0, 4)) as client:
            leaving.append(client)
            client.join(BODY)
            client.leave()
            assert client.num_retries
        assert servers.is_over()
    finally:
        servers.close()
