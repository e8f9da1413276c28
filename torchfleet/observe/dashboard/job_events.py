"""The events of a job, found in its record: lines of the launcher, restarts, losses, saves."""

from __future__ import annotations

from collections import deque
from typing import Any

from torchfleet.observe.dashboard.browser_values import mapping, number, plain
from torchfleet.observe.watch.figures import plural

_MOST_EVENTS, _MOST_SAVES = 1000, 500
_COUNTED = {  # fields of a status that only grow: what an increase means
    "retries": ("warning", "sent", "request", " again"),
    "errors": ("warning", "answered", "request", " with an error"),
    "dropped": ("warning", "dropped", "gradient", " of the network, too old"),
    "workers_lost": ("fault", "lost", "worker", ""),
}


class JobEvents:
    """Events and saves in the order of their records. The oldest are dropped beyond a limit."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.saves: deque[dict[str, Any]] = deque(maxlen=_MOST_SAVES)
        self._new: list[dict[str, Any]] = []
        self._new_saves: list[dict[str, Any]] = []

    def add(self, time: float, kind: str, text: str, role: str = "") -> None:
        """`kind`: info, warning, fault, restart or end."""
        event = {"time": time, "kind": kind, "text": text, "role": role}
        self.events.append(event)
        self._new.append(event)

    def compare(self, time: float, key: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Find what happened between two records of a process; `before` is empty if this is the first."""
        num, num_before = (number(record.get("num_restarts")) or 0 for record in (after, before))
        if before and num > num_before:
            self.add(time, "restart", f"{key} was started again ({num})", key)
        if after.get("state") == "failed" and before.get("state") != "failed":
            self.add(time, "fault", f"{key} ended with {number(after.get('returncode'))}", key)
        status, status_before = mapping(after.get("status")), mapping(before.get("status"))
        if num != num_before:
            status_before = {}  # counters restart from zero
        for field, (kind, did, noun, how) in _COUNTED.items():
            if status.get(field) == status_before.get(field):
                continue
            grown = (number(status.get(field)) or 0) - (number(status_before.get(field)) or 0)
            if grown > 0 and field in status_before:  # a worker may retry before its server has started: no event
                self.add(time, kind, f"{key} {did} {plural(int(grown), noun)}{how}", key)
        if status.get("saves") != status_before.get("saves"):
            self._compare_saves(time, key, mapping(status.get("saves")), mapping(status_before.get("saves")))

    def take_new(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Events and saves since the last call."""
        new, self._new = self._new, []
        saves, self._new_saves = self._new_saves, []
        return new, saves

    def _compare_saves(self, time: float, key: str, saves: dict[str, Any], before: dict[str, Any]) -> None:
        if (number(saves.get("num")) or 0) <= (number(before.get("num")) or 0):
            return
        save = {**plain(saves), "time": number(saves.get("last_time")) or time, "role": key}
        self.saves.append(save)
        self._new_saves.append(save)
