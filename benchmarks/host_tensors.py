"""Memory of tensors on the host: what torch's allocator of host memory gives and takes back, as its profiler tells it.

Resident memory of a process also has modules, threads' stacks and what malloc keeps in reserve: of small models that is
most of it, and it says nothing about a library's own copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch._C import _autograd
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
        _autograd._enable_record_function(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _autograd._enable_record_function(True)
        self._profile.__exit__(kind, error, trace)
        results = self._profile.profiler.kineto_results
        changes = [event for event in results.events() if event.name() == "[memory]"]
        self.peak = peak_of((event.start_ns(), event.nbytes()) for event in changes)


def peak_of(changes: Iterable[tuple[int, int]]) -> int:
    """The highest sum of (time, bytes given or, below zero, taken back), in the order of time."""
    peak = total = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        total += change
        peak = max(peak, total)
    return peak
