"""Requests that are part of a traced step: when a server took, computed and answered them."""

from __future__ import annotations

import time

from torchfleet.base.tracing.span import HANDLE, HELD, Span, Value
from torchfleet.base.tracing.span_recorder import Recorder
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Command

_HELD_NS = 50_000  # a reply that leaves sooner leaves at once


class TracedRequests:
    """Times of requests. A reply says them to the worker in any case; spans are made where there is a recorder."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def take(self, request: Request) -> None:
        request.taken = self._now()

    def computed(self, request: Request) -> None:
        """Its command has run, and has an answer, or will have one later."""
        request.computed = self._now()

    def answered(self, request: Request) -> int:
        """Its reply leaves now; returns when that is."""
        now = self._now()
        if self.recorder is not None:
            self._record(self.recorder, request, now)
        return now

    def _now(self) -> int:
        return time.time_ns() if self.recorder is None else self.recorder.now()

    def _record(self, recorder: Recorder, request: Request, now: int) -> None:
        message = request.message
        name = Command(message.command).name.lower() if message.command in tuple(Command) else "unknown command"
        of_worker = f"{name} of worker {message.worker}"
        computed = request.computed or now
        context = message.trace, message.incarnation, message.client, message.call
        more: dict[str, Value] = {"worker": message.worker, "bytes": request.num_bytes}
        recorder.add(Span(of_worker, HANDLE, request.taken, computed, "requests", *context, more))
        if now - computed > _HELD_NS:
            recorder.add(Span(f"{of_worker}, held", HELD, computed, now, "held", *context))
