"""Records the spans of a process's traced steps. `active` is None without tracing, so that a check costs little."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchfleet.base.tracing.span import QUEUE, REQUEST, WAIT, Span, Value

LIMIT = 200_000  # spans that are kept; later ones are only counted
_MOST_OFFSET = 10**9 * 3600 * 24 * 365  # nanoseconds: clocks that differ by more than this are not used


@dataclass(frozen=True)
class Mark:
    """A traced step, for handing work from one thread to another."""

    trace: int
    since: int


class _Own(threading.local):
    """The traced step of the calling thread."""

    trace = 0
    track = ""


class Recorder:
    """The spans of one process. Any thread may add spans."""

    def __init__(self, origin: int = 0, clock: Callable[[], int] = time.time_ns, limit: int = LIMIT) -> None:
        """`origin`: the number of the worker's process that makes the steps; 0 on a server."""
        self.origin, self.now = origin, clock
        self.num_dropped = 0
        self.offsets: dict[int, tuple[int, int]] = {}  # by server process: (shortest round trip, its clock minus ours)
        self._spans: deque[Span] = deque()
        self._limit = limit
        self._own = _Own()

    @property
    def trace(self) -> int:
        """The number of the calling thread's traced step; 0: none."""
        return self._own.trace

    def begin(self, trace: int, track: str) -> None:
        """Begin a traced step in the calling thread; 0: a step that is not traced."""
        self._own.trace, self._own.track = trace, track

    def add(self, span: Span) -> None:
        if len(self._spans) < self._limit:
            self._spans.append(span)
        else:
            self.num_dropped += 1

    def take(self) -> list[Span]:
        """Return all spans so far and clear them."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._spans.popleft())
        return taken

    def note(self, name: str, kind: str, start: int, **more: Value) -> None:
        """Add a span of the calling thread's step that ends now."""
        own = self._own
        self.add(Span(name, kind, start, self.now(), own.track, own.trace, self.origin, more=more))

    def note_request(self, request: Request, server: str, incarnation: int, taken: int, answered: int) -> None:
        """Record a reply. `taken`, `answered`: times by the server's clock; both 0 if the server does not know them."""
        now, more = self.now(), dict[str, Value](server=server, bytes=request.num_bytes)
        own = answered - taken
        round_trip = now - request.sent - own
        if taken and 0 <= own <= now - request.sent:
            offset = (taken - request.sent + answered - now) // 2
            more |= {"server_ms": own / 1e6, "way_ms": round_trip / 1e6}
            best = self.offsets.get(incarnation)
            if abs(offset) < _MOST_OFFSET and (best is None or round_trip < best[0]):
                self.offsets[incarnation] = round_trip, offset
        name, track = f"{request.name} {server}", f"requests to {server}"
        self.add(
            Span(
                name, REQUEST, request.sent, now, track, request.trace, self.origin, request.client, request.call, more
            )
        )

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Record a span while the calling thread waits for a reply."""
        start = self.now()
        try:
            yield
        finally:
            if self._own.trace:
                self.note(what, WAIT, start)

    @contextlib.contextmanager
    def as_part_of(self, marks: Sequence[Mark], track: str) -> Iterator[None]:
        """The calling thread's spans belong to the first of these steps. Records the steps' time in the queue until
        now.
        """
        for mark in marks:
            self._own.trace, self._own.track = mark.trace, f"{track}: queue"
            self.note("queue", QUEUE, mark.since)
        self.begin(marks[0].trace, track)
        try:
            yield
        finally:
            self.begin(0, "")


@dataclass(slots=True)
class Request:
    """A traced request, on the sender's side."""

    name: str
    trace: int
    client: int
    call: int
    sent: int
    num_bytes: int


active: Recorder | None = None


def use(recorder: Recorder | None) -> Recorder | None:
    """Set the recorder of this process; None: record nothing. Returns the previous one."""
    global active
    before, active = active, recorder
    return before


def mark() -> Mark | None:
    """The calling thread's traced step, to hand to another thread; None if it is not traced."""
    recorder = active  # another thread may end tracing meanwhile
    if recorder is None or not recorder.trace:
        return None
    return Mark(recorder.trace, recorder.now())


def part_of(marks: Sequence[Mark | None], track: str) -> contextlib.AbstractContextManager[None]:
    """Like Recorder.as_part_of, for the marks that are not None."""
    recorder = active  # another thread may end tracing meanwhile
    found = [each for each in marks if each is not None]
    return recorder.as_part_of(found, track) if recorder is not None and found else contextlib.nullcontext()
