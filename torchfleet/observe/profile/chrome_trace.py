"""One trace in the Trace Event Format, as chrome://tracing and Perfetto open it, from the parts of all processes."""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchfleet import __version__
from torchfleet.base.errors import FleetError
from torchfleet.base.tracing.profile_folder import Part
from torchfleet.base.tracing.span import HANDLE, REQUEST, Span
from torchfleet.observe.profile.torch_events import TorchTrace

_TRACKS = {"steps": 0, "sender": 100, "exchange": 110, "requests to": 200, "requests": 0, "held": 100}
_FIRST_THREAD = 1 << 23  # number of our first track: above all thread numbers of Linux

Event = dict[str, Any]


@dataclass(frozen=True)
class Clock:
    """A machine's clock against that of the first worker's machine, in nanoseconds."""

    ahead: int
    round_trip: int  # of the requests that measured it: the error is at most half of that
    is_measured: bool = True


class ChromeTrace:
    """Events of all processes on one time axis, which begins with the first span."""

    def __init__(self, parts: Sequence[Part], torch_traces: Mapping[str, TorchTrace]) -> None:
        """`torch_traces`: what torch.profiler saw, by the name of the process. Raises FleetError if nothing was
        recorded."""
        self._parts = sorted(parts, key=lambda part: (part.role == "server", part.index))
        self.clocks = clocks(self._parts)
        starts = [self._moved(part, span.start) for part in self._parts for span in part.spans]
        if not starts:
            raise FleetError("no step was recorded: did the job make any after the profile began?")
        self.base = min(starts)
        self._torch = torch_traces

    def document(self) -> dict[str, Any]:
        return {
            "traceEvents": list(self._events()),
            "displayTimeUnit": "ms",
            "otherData": {
                "torchfleet": __version__,
                "begins": f"{self.base} ns since 1970",
                "clocks": {part.host: _clock_text(self.clocks[part.machine]) for part in self._parts},
                "dropped spans": sum(part.num_dropped for part in self._parts),
            },
        }

    def write(self, path: Path) -> None:
        """As JSON, compressed if the name ends in .gz."""
        data = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)

    def _events(self) -> Iterator[Event]:
        linked = self._calls(REQUEST) & self._calls(HANDLE)  # a reply may come after the last step
        for number, part in enumerate(self._parts, 1):  # not by pid, which may be the same on several machines
            yield _meta(number, "process_name", name=f"{part.name} ({part.host}, pid {part.pid})")
            yield _meta(number, "process_sort_index", sort_index=number)
            yield from self._own_events(part, number, linked)
            if part.spans and part.name in self._torch:  # without a step there is nothing to cut it to
                shift = self.clocks[part.machine].ahead
                first, last = min(s.start for s in part.spans), max(s.end for s in part.spans)
                yield from self._torch[part.name].events(number, part.name, self.base + shift, first, last)

    def _calls(self, kind: str) -> set[tuple[int, int]]:
        return {(span.client, span.call) for part in self._parts for span in part.spans if span.kind == kind}

    def _own_events(self, part: Part, number: int, linked: set[tuple[int, int]]) -> Iterator[Event]:
        seen: set[tuple[int, int]] = set()
        threads = _lanes(part.spans)
        for thread, name, order in sorted({(found[0], found[1], found[2]) for found in threads.values()}):
            yield _meta(number, "thread_name", thread, name=name)
            yield _meta(number, "thread_sort_index", thread, sort_index=order)
        for index, span in enumerate(part.spans):
            thread = threads[index][0]
            start, end = (self._axis(part, time) for time in (span.start, span.end))
            yield {
                "ph": "X", "cat": span.kind, "name": span.name, "pid": number, "tid": thread, "ts": start,
                "dur": max(0.0, end - start), "args": {"step": span.trace, **span.more},
            }  # fmt: skip
            call = span.client, span.call
            if call in linked and span.kind in (REQUEST, HANDLE) and call not in seen:
                seen.add(call)  # a request that was sent again is handled again: draw one arrow
                yield _arrow(span, number, thread, start)

    def _moved(self, part: Part, time: int) -> int:
        """A time of this process, by the clock of the first worker's machine."""
        return time - self.clocks[part.machine].ahead

    def _axis(self, part: Part, time: int) -> float:
        return (self._moved(part, time) - self.base) / 1000


def _meta(process: int, what: str, thread: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _arrow(span: Span, process: int, thread: int, time: float) -> Event:
    """One end of an arrow from a worker's request to the server's work for it."""
    ends = {"ph": "s"} if span.kind == REQUEST else {"ph": "f", "bp": "e"}
    place = {"pid": process, "tid": thread, "ts": time}
    return {**ends, "cat": "request", "name": "request", "id": f"{span.client:x}.{span.call:x}", **place}


def _lanes(spans: Sequence[Span]) -> dict[int, tuple[int, str, int]]:
    """By index of a span: the thread that it is drawn in, its name, and its place among the threads.

    Spans of one thread must follow one another or be nested. Spans of a track that do neither are drawn in further
    threads beside it.
    """
    found: dict[int, tuple[int, str, int]] = {}
    tracks = sorted({span.track for span in spans}, key=lambda track: (_place(track), track))
    for track_number, track in enumerate(tracks):
        own = sorted((i for i, span in enumerate(spans) if span.track == track), key=lambda i: _nested(spans[i]))
        open_ends: list[list[int]] = []  # by lane: the ends of the spans that are open
        for i in own:
            lane = _free_lane(open_ends, spans[i])
            name = track if lane == 0 else f"{track} ({lane + 1})"
            found[i] = _FIRST_THREAD + 100 * track_number + lane, name, _place(track) + lane
    return found


def _nested(span: Span) -> tuple[int, int]:
    return span.start, -span.end


def _free_lane(open_ends: list[list[int]], span: Span) -> int:
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or ends[-1] >= span.end:
            ends.append(span.end)
            return lane
    open_ends.append([span.end])
    return len(open_ends) - 1


def _place(track: str) -> int:
    return next((place for known, place in _TRACKS.items() if track.startswith(known)), 300)


def _clock_text(clock: Clock) -> str:
    if not clock.is_measured:
        return "not measured: no request of a profiled worker went there"
    ahead, error = clock.ahead / 1e6, clock.round_trip / 2e6
    return f"{ahead:+.3f} ms against the first worker's machine, to {error:.3f} ms; corrected"


def clocks(parts: Sequence[Part]) -> dict[str, Clock]:
    """Return the clocks by machine. A machine without a chain of requests to the first worker's gets offset 0."""
    edges = _edges(parts)
    first = next((part.machine for part in parts if part.role != "server"), parts[0].machine)
    found: dict[str, Clock] = {}
    waiting = [(0, first, 0)]
    while waiting:  # shortest path by round-trip time to every machine
        round_trip, machine, ahead = heapq.heappop(waiting)
        if machine in found:
            continue
        found[machine] = Clock(ahead, round_trip)
        for (here, there), (more, further) in edges.items():
            if here == machine and there not in found:
                heapq.heappush(waiting, (round_trip + more, there, ahead + further))
    return {part.machine: found.get(part.machine, Clock(0, 0, False)) for part in parts}


def _edges(parts: Sequence[Part]) -> dict[tuple[str, str], tuple[int, int]]:
    """By pair of machines, in both orders: the shortest round trip, and how far the second's clock is ahead."""
    machine_of = {part.process: part.machine for part in parts}
    best: dict[tuple[str, str], tuple[int, int]] = {}
    for part in parts:
        for offset in part.offsets:
            there = machine_of.get(offset.process)
            if there is None or there == part.machine:
                continue
            for pair, ahead in (((part.machine, there), offset.ahead), ((there, part.machine), -offset.ahead)):
                if pair not in best or offset.round_trip < best[pair][0]:
                    best[pair] = offset.round_trip, ahead
    return best
