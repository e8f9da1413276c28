"""The Trace Event Format, as far as a trace must keep to it to be opened: an oracle beside the code that writes it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def check(document: dict[str, Any]) -> None:
    """Every event has what its phase needs; processes and threads have names; slices of a thread are nested."""
    events = document["traceEvents"]
    assert isinstance(events, list)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    flows: dict[Any, list[str]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], (int, float))
        assert event["ph"] in ("M", "X", "s", "t", "f", "i"), event
        if event["ph"] == "M":
            continue
        assert event["ts"] >= -1.0, event
        assert event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
        if event["ph"] in ("s", "t", "f"):
            flows[event["cat"], event["id"]].append(event["ph"])
    assert all(phases.count("s") <= 1 for phases in flows.values())
    check_nesting([event for event in events if event["ph"] == "X" and event.get("cat") != "cpu_op"])


def check_nesting(slices: list[Event]) -> None:
    """Two slices of one thread follow one another, or one lies within the other."""
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append(event)
    for events in threads.values():
        open_ends: list[float] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, event
            open_ends.append(end)
