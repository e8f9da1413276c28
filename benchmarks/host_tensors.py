"""Memory of tensors on the host: what torch's allocator of host memory gives and takes back, as its profiler tells it.

Resident memory of a process also has modules, threads' stacks and what malloc keeps in reserve: of small models that is
most of it, and it says nothing about a library's own copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from torch._C._autograd import _enable_record_function
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


class HostTensors:
    """A context: `peak` is the most bytes, at any time inside, of tensors that were made inside. For some steps."""

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.peak = 0

    def __enter__(self) -> HostTensors:
        self._profile.__enter__()
        # Memory is told without it. Threads of gloo note the end of a function after the one that waits has gone on,
        # in a list that may be freed by then: a segmentation fault.
        _enable_record_function(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _enable_record_function(True)
        self._profile.__exit__(kind, error, trace)
        results = self._profile.profiler.kineto_results
        self.peak = peak_of(_changes(results.experimental_event_tree()))


def _changes(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes given or, below zero, taken back) of all events, and of those inside of them."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _changes(event.children)


def peak_of(changes: Iterable[tuple[int, int, int]]) -> int:
    """The most bytes at any time of what was given, by (time, address, bytes given or, below zero, taken back).

    What was given before the first change does not count: Python's garbage collector may take a model back that was
    made, and recorded, long before.
    """
    peak = total = 0
    given: dict[int, int] = {}  # bytes by address
    for _, address, change in sorted(changes, key=lambda change: change[0]):
        total -= given.pop(address, 0)  # of a new tensor, too: a thread that is not recorded took the one before back
        if change > 0:
            given[address] = change
            total += change
        peak = max(peak, total)
    return peak
