"""A server's part in traces and profiles: it records spans of the requests that belong to traced steps."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, time, time_ns

from torchfleet.base.monitor.notices import tell
from torchfleet.base.tracing.otlp import OtlpExport
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import LOOK, ProfileFolder, ProfileRequest
from torchfleet.base.tracing.span import HANDLE, HELD, Span, Value
from torchfleet.base.tracing.span_recorder import Recorder
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import Command
from torchfleet.ps.server.layers import Result, Run

_HELD_NS = 50_000  # a reply that leaves within this time does not count as held
MOST_OF_ONE = 100_000  # requests of one connection that may have spans, in a burst: half of what a recorder keeps
_PER_SECOND = 1_000  # further requests with spans, per second
_MAX_SHARES = 4_096  # connections that are counted


class Shares:
    """Limits how many requests of each connection have spans, in total and per second. A connection that sends traced
    requests without end then leaves room in a profile for the others.
    """

    def __init__(self) -> None:
        self._left: dict[Peer, tuple[float, int]] = {}  # by connection: requests left, and when that was, in ns

    def take(self, peer: Peer, now: int) -> bool:
        """Whether one more request of this connection may have spans."""
        left, since = self._left.get(peer, (float(MOST_OF_ONE), now))
        left = min(left + _PER_SECOND * max(now - since, 0) / 1e9, float(MOST_OF_ONE))
        if peer not in self._left and len(self._left) >= _MAX_SHARES:
            self._left.clear()
        self._left[peer] = (max(left - 1, 0.0), now)
        return left >= 1


class TracedRequests:
    """Records when the server received, computed and answered the requests of traced steps. A layer (layers.py).

    Every reply to such a request carries the times to the worker. Spans are recorded only if `recorder` is set.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._shares = Shares()

    def around(self, inner: Run, request: Request) -> Result:
        """As Layer.around."""
        if not request.message.trace:
            return inner(request)
        request.taken = self._now()
        try:
            return inner(request)
        finally:  # also without a result, for a reply that comes later
            request.computed = self._now()

    def answered(self, request: Request) -> int:
        """Note that the reply leaves now, and return the time."""
        now = self._now()
        if self.recorder is not None:
            if self._shares.take(request.peer, now):
                self._record(self.recorder, request, now)
            else:
                self.recorder.num_dropped += 1
        return now

    def _now(self) -> int:
        return time_ns() if self.recorder is None else self.recorder.now()

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


class ServerTracing:
    """Begins and ends profiles, and owns the OTLP export. Call `look` often: it mostly costs one read of a clock."""

    def __init__(self, name: ProcessName, requests: TracedRequests, folder: ProfileFolder, every: int) -> None:
        self._name, self._requests, self._folder = name, requests, folder
        self._export = OtlpExport(name.role, name.index) if every else None
        self._profile: Path | None = None
        self._until = self._next = 0.0
        self._record(None)

    def look(self) -> None:
        """Begin a requested profile, or end the current one if it is over."""
        if self._profile is None:
            request = self._folder.look()
            if request is not None:
                self._begin_profile(request)
            return
        now = monotonic()
        if now < self._next:
            return
        self._next = now + LOOK / 10
        if (self._profile / "end").exists() or time() > self._until or not self._profile.is_dir():
            self._end_profile()

    def _begin_profile(self, request: ProfileRequest) -> None:
        folder = self._folder.of(request)
        try:
            self._name.say_here(folder)
        except OSError as error:
            self._tell(error)
            return
        self._profile, self._until = folder, request.until
        self._record(Recorder())

    def close(self) -> None:
        """End the current profile and the export. Called when the server stops."""
        if self._profile is not None:
            self._end_profile()
        self._requests.recorder = None
        if self._export is not None and (lost := self._export.close()):
            tell(f"torchfleet server {self._name.index}: {lost}")
        self._export = None

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        recorder = self._requests.recorder
        self._record(None)
        if profile is None or recorder is None or not profile.is_dir():
            return  # the requester may have given up and removed the folder
        try:
            self._name.leave_part(profile, recorder)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        tell(
            f"torchfleet server {self._name.index}: cannot write its part of the requested profile: {error}. The "
            "server continues."
        )

    def _record(self, recorder: Recorder | None) -> None:
        own = None if self._export is None else self._export.recorder
        self._requests.recorder = recorder or own
