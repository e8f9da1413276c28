"""Traced requests of a hostile worker: they take their own share of a server's spans, and not that of others."""

from __future__ import annotations

import pytest

from torchfleet.base.tracing.span_recorder import Recorder
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Command, Message
from torchfleet.ps.server import server_tracing
from torchfleet.ps.server.server_tracing import Shares, TracedRequests


def test_one_connection_does_not_use_up_the_spans_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_tracing, "MOST_OF_ONE", 50)
    requests, recorder = TracedRequests(), Recorder(limit=100, clock=lambda: 1)
    requests.recorder = recorder
    for number in range(1000):  # whatever client and worker it claims to be
        message = Message(Command.PING, worker=number, client=number, trace=1 + number % 65535)
        requests.answered(Request(message, b"hostile"))
    for _ in range(50):
        requests.answered(Request(Message(Command.PING, worker=3, client=5, trace=9), b"honest"))
    spans = recorder.take()
    assert [span.more["worker"] for span in spans[50:]] == [3] * 50
    assert len(spans) == 100
    assert recorder.num_dropped == 950


def test_a_share_fills_again_and_the_number_of_shares_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_tracing, "MOST_OF_ONE", 10)
    shares = Shares()
    assert [shares.take(b"a", 0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert [shares.take(b"a", 3_000_000) for _ in range(4)] == [True] * 3 + [False]
    for number in range(3 * server_tracing._MAX_SHARES):
        assert shares.take(number.to_bytes(4, "little"), 0)
    assert len(shares._left) <= server_tracing._MAX_SHARES
