"""Traced steps: requests and what servers do for them are linked, clocks are compared, and all of it is bounded."""

from __future__ import annotations

import itertools
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from support.cases import each_of
from support.fleets import Fleet

from torchfleet.base.errors import RoleError
from torchfleet.base.tracing import span_recorder
from torchfleet.base.tracing.otlp import trace_every
from torchfleet.base.tracing.span import HANDLE, PHASE, QUEUE, REQUEST, STEP, WAIT, Span, request_id, step_id, trace_id
from torchfleet.base.tracing.span_recorder import Recorder, Request
from torchfleet.base.tracing.step_spans import BACKWARD, FORWARD, LOSS, UPDATE, StepSpans
from torchfleet.ps.net.transport import InProcess
from torchfleet.ps.net.wire import Command, Message, Reply, decode, decode_reply, encode, encode_reply
from torchfleet.ps.server import server_tracing
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Connection

SECOND = 10**9
# The header as it was before steps were traced: two bytes that are not read.
BEFORE = struct.Struct("<4sBBBBIHxxQQQQQII")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder(origin=42)
    before = span_recorder.use(made)
    yield made
    span_recorder.use(before)


def test_a_traced_request_reads_as_before_to_a_server_that_knows_no_traces() -> None:
    message = Message(Command.PULL, client=5, call=6, sequence=7, incarnation=8, shard=1, term=2)
    plain, traced = encode(message)[0], encode(Message(**{**fields(message), "trace": 65535}))[0]
    assert BEFORE.unpack(plain) == BEFORE.unpack(traced)
    assert plain != traced
    assert decode([traced]).trace == 65535
    assert decode([plain]).trace == 0


def fields(message: Message) -> dict[str, object]:
    return {name: getattr(message, name) for name in Message.__slots__}


def test_times_of_a_reply_come_back() -> None:
    reply = decode_reply(encode_reply(Reply(Command.PULL, 0, 3, 9, 6, taken=1 << 62, answered=(1 << 62) + 5)))
    assert (reply.taken, reply.answered, reply.call, reply.incarnation) == (1 << 62, (1 << 62) + 5, 6, 9)


def test_requests_and_what_a_server_does_for_them_are_linked_and_clocks_compared(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's clock is three seconds ahead: that is what is measured, to half a round trip."""
    monkeypatch.setattr(server_tracing, "_HELD_NS", 60 * SECOND)  # a process that did not run has held no reply
    server = Server()
    server.traced.recorder = theirs = Recorder(clock=lambda: time.time_ns() + 3 * SECOND)
    with Client([InProcess(server).connect()]) as client:
        client.create_table(TableSpec("rows", dim=2, rule=Rule("sgd")))
        assert not recorder.take()  # no step is traced yet
        recorder.begin(7, "steps")
        client.pull("rows", np.arange(4)).result()
        client.push("rows", np.arange(4), np.ones((4, 2), np.float32)).result()
        recorder.begin(0, "")
        client.pull("rows", np.arange(4)).result()
    own, handled = recorder.take(), theirs.take()
    requests = [span for span in own if span.kind == REQUEST]
    assert [span.name for span in requests] == ["pull server 0", "push server 0"]
    assert [span.name for span in handled] == ["pull of worker 0", "push of worker 0"]
    for request, handle in zip(requests, handled, strict=True):
        assert handle.kind == HANDLE
        assert (handle.client, handle.call, handle.trace) == (request.client, request.call, 7)
        assert request.start <= handle.start - 3 * SECOND <= handle.end - 3 * SECOND <= request.end
        assert request.more["server_ms"] <= (request.end - request.start) / 1e6
    ((round_trip, ahead),) = recorder.offsets.values()
    assert abs(ahead - 3 * SECOND) <= round_trip


@pytest.mark.parametrize(
    ("taken", "answered"), [(0, 0), (5, 4), (1, 2**64 - 1), (2**64 - 2, 2**64 - 1), (2**63, 2**63 + 1)]
)
def test_times_that_cannot_be_make_no_clock(recorder: Recorder, taken: int, answered: int) -> None:
    recorder.note_request(Request("pull", 1, 2, 3, time.time_ns(), 10), "server 0", 9, taken, answered)
    assert recorder.offsets == {}
    assert len(recorder.take()) == 1


def test_spans_are_bounded() -> None:
    full = Recorder(limit=3)
    for _ in range(5):
        full.note("x", WAIT, 0)
    assert len(full.take()) == 3
    assert full.num_dropped == 2


def test_one_step_of_n_is_traced_and_its_phases_fill_it(recorder: Recorder) -> None:
    steps = StepSpans(recorder, every=3)
    steps.begin_step()
    for _ in range(7):
        steps.enter(FORWARD)
        backward = steps.enter_loss()
        torch_thread = threading.Thread(target=backward.note)  # as on GPUs
        torch_thread.start()
        torch_thread.join()
        steps.enter(UPDATE)
        steps.end_step()
    spans = recorder.take()
    assert [span.name for span in spans if span.kind == STEP] == ["step 3", "step 6"]
    assert [span.trace for span in spans if span.kind == STEP] == [1, 2]
    for step in (span for span in spans if span.kind == STEP):
        phases = [span for span in spans if span.kind == PHASE and span.trace == step.trace]
        assert [span.name for span in phases] == ["data", FORWARD, LOSS, BACKWARD, UPDATE]
        assert (phases[0].start, phases[-1].end) == (step.start, step.end)
        assert all(a.end == b.start for a, b in itertools.pairwise(phases))


def test_a_step_goes_with_its_gradients_to_the_thread_that_sends_them(recorder: Recorder) -> None:
    assert span_recorder.mark() is None
    recorder.begin(9, "steps")
    mark = span_recorder.mark()
    recorder.begin(0, "")
    with span_recorder.part_of([None, mark], "sender"):
        assert recorder.trace == 9
    assert recorder.trace == 0
    (queue,) = recorder.take()
    assert (queue.kind, queue.trace) == (QUEUE, 9)
    span_recorder.use(None)
    with span_recorder.part_of([mark], "sender"):
        pass


@pytest.mark.parametrize("function", [span_recorder.mark, span_recorder.part_of])
def test_a_profile_may_end_at_any_moment_in_another_thread(function: Callable[..., Any], recorder: Recorder) -> None:
    arguments = () if function is span_recorder.mark else ([span_recorder.Mark(9, 0)], "sender")
    assert num_endings(recorder, function.__code__, lambda: function(*arguments)) > 5


@pytest.mark.parametrize("method", [Connection.submit, Connection.wait, Connection._note_reply])
def test_a_profile_may_end_at_any_moment_of_a_request(
    method: Callable[..., Any], recorder: Recorder, fleet: Fleet
) -> None:
    client = fleet.client()
    client.create_table(TableSpec("rows", dim=2, rule=Rule("sgd")))
    keys = np.array([1, 2, 3], np.uint64)
    assert num_endings(recorder, method.__code__, lambda: client.pull("rows", keys).result()) > 5


def num_endings(recorder: Recorder, code: CodeType, call: Callable[[], Any]) -> int:
    """Repeat the call, and end tracing just before another instruction of `code` each time. Returns the number of
    instructions."""
    num_before = 0
    recorder.begin(9, "steps")
    while ends_before(num_before, code, call):
        span_recorder.use(recorder)
        num_before += 1
    return num_before


def ends_before(instruction: int, code: CodeType, call: Callable[[], Any]) -> bool:
    """Make the call; tracing ends just before this instruction of `code`. False: the code ran fewer instructions."""
    places = itertools.count()
    has_ended = False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal has_ended
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(places) == instruction:
            has_ended = True
            span_recorder.use(None)
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions only if a frame asks before settrace
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return has_ended


def test_identities_differ_and_are_the_same_on_both_sides() -> None:
    steps = {(trace_id(origin, trace), step_id(origin, trace)) for origin in (1, 2, 2**63) for trace in range(1, 200)}
    assert len({whole for whole, _ in steps}) == len({own for _, own in steps}) == 3 * 199
    assert len({request_id(client, call) for client in (1, 2**64 - 1) for call in range(100)}) == 200
    assert 0 < trace_id(5, 6) < 1 << 128
    assert 0 < request_id(5, 6) < 1 << 64


@each_of("text", ["-1", "x", "1.5", "1" * 12, "١"])
def test_a_number_of_steps_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RoleError, match="FLEET_TRACE_EVERY"):
        trace_every({"FLEET_TRACE_EVERY": text})
    assert trace_every({}) == 0
    assert trace_every({"FLEET_TRACE_EVERY": "10"}) == 10


def test_spans_survive_their_file(recorder: Recorder) -> None:
    span = Span("n", WAIT, 2**62, 2**62 + 1, "t", 3, 2**64 - 1, 2**64 - 1, 4, {"a": 1, "b": 0.5, "c": "x"})
    assert msgspec.json.decode(msgspec.json.encode(span), type=Span) == span
