"""A server within a process looks at the clock as one behind a socket does: every TICK seconds, and not at requests."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.fleets import Talk

from torchfleet.base.errors import BarrierError
from torchfleet.ps.net import transport
from torchfleet.ps.net.transport import TICK, InProcess
from torchfleet.ps.net.wire import Command, decode_reply, encode
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))


class Ticking(Server):
    """Notes when it looks at the clock."""

    def __init__(self, num_workers: int = 0) -> None:
        super().__init__(1 << 24, num_workers)
        self.ticks: list[float] = []

    def tick(self, now: float) -> list:
        self.ticks.append(now)
        return super().tick(now)


def test_requests_that_come_between_two_looks_cause_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(transport.time, "monotonic", lambda: now[0])
    server = Ticking()
    channel, talk = InProcess(server).connect(), Talk(server)
    for later in (0.0, TICK / 2, TICK * 0.99, TICK, TICK * 1.5, 10.0):
        now[0] = 100.0 + later
        channel.send(encode(talk.message(Command.PING)))
        reply = channel.receive(0.0)
        assert reply is not None
        assert decode_reply(reply).command == Command.PING
    assert server.ticks == pytest.approx([100.0, 100.0 + TICK, 110.0])


def test_a_wait_ends_when_its_time_is_up() -> None:
    server = Ticking(num_workers=2)
    with Client([InProcess(server).connect()], worker=0) as client:
        started = time.monotonic()
        with pytest.raises(BarrierError):
            client.barrier("alone", 2, timeout=0.2)
        assert time.monotonic() - started >= 0.2
    gaps = np.diff(server.ticks)
    assert (gaps > TICK - 1e-6).all()


def test_work_in_slices_is_done_and_answered_without_a_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Ticking()
    with Client([InProcess(server).connect()]) as client:
        client.create_table(ROWS)
        client.push("rows", np.arange(50_000), np.ones((50_000, 2), np.float32))
        monkeypatch.setattr(transport, "TICK", 1e9)
        num_ticks = len(server.ticks)
        (found,) = client.inspect("rows", top=3)
        assert found["rows"] == 50_000
        assert len(server.ticks) <= num_ticks + 1  # the one that was due before the pause became longer
