"""The events of torch.profiler of one process, moved to the time axis of the trace of all processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from torchfleet.base.errors import FleetError

_DEVICES = 10_000  # the number of a worker's first GPU as a process of the trace
_PER_WORKER = 100
_FLOWS = ("s", "t", "f")

Event = dict[str, Any]


class TorchTrace:
    """A file of torch.profiler. Its times are microseconds after a base, which is nanoseconds since 1970."""

    def __init__(self, path: Path, pid: int) -> None:
        """`pid`: of the process that wrote it. Raises FleetError if it is not a trace of torch.profiler."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            self._base, self._events = int(found.get("baseTimeNanoseconds", 0)), list(found["traceEvents"])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            raise FleetError(f"{path} is no trace of torch.profiler: {error!r}") from None
        self._pid = pid

    def events(self, process: int, name: str, base: int, first: int, last: int) -> Iterator[Event]:
        """Yield the events between `first` and `last`, in nanoseconds by that process's clock, on a time axis that
        begins at `base` by the same clock. `process`: its number in the trace; its GPUs get numbers of their own."""
        shift = (self._base - base) / 1000
        begin, end = (first - base) / 1000, (last - base) / 1000
        others: dict[Any, int] = {}
        for event in self._events:
            pid, kind = event.get("pid"), event.get("ph")
            if not isinstance(pid, int):
                continue  # marks of the profiler itself
            if pid != self._pid and pid not in others:
                others[pid] = _DEVICES + _PER_WORKER * process + len(others)
                yield {
                    "ph": "M", "name": "process_name", "pid": others[pid], "tid": 0, "ts": 0,
                    "args": {"name": f"{name}: GPU {pid}"},
                }  # fmt: skip
            moved = {**event, "pid": process if pid == self._pid else others[pid]}
            if kind == "M":
                if event.get("name") in ("thread_name", "thread_sort_index"):
                    yield {**moved, "ts": 0}
                continue
            if not isinstance(event.get("ts"), (int, float)):
                continue
            moved["ts"] = event["ts"] + shift
            if not begin <= moved["ts"] <= end:
                continue
            if kind in _FLOWS:
                moved["id"] = f"{name} {event.get('id')}"
            yield moved
