"""The record of a run as the page shows it: every process as it is now, series for charts, and what happened.

Everything is built from the records of history.jsonl, one at a time, so that a running job and an ended one look the
same. Changes since the last call are returned as a delta; applied to a snapshot it gives the next snapshot.
"""

from __future__ import annotations

from typing import Any

from torchfleet.observe.dashboard.browser_values import mapping, number, plain
from torchfleet.observe.dashboard.job_events import JobEvents
from torchfleet.observe.dashboard.thinned_series import Columns, Grid, Value

MOST_POINTS = 600
_FEWEST_POINTS = 120
_ALL_POINTS = 30_000  # of one series of all processes together: with many of them each has fewer points
_MOST_ROLES = 2000
_FIELDS = (
    "samples_per_s", "steps_per_s", "queue", "waiting", "pull_wait_ms", "push_wait_ms", "memory",
    "requests_per_s", "busy", "bytes_in", "bytes_out",
)  # fmt: skip
_TABLE_FIELDS = ("rows", "bytes", "evicted")
_WARNING = "warning: "  # prefix of the launcher's lines that are warnings
_OPEN = ("starting", "running", "waiting")  # when the job has ended, a process in one of these states counts as stopped


class JobRecord:
    """Takes records in the order in which they were written. Not thread-safe."""

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._roles: dict[str, dict[str, Any]] = {}  # by key: the last record of the process
        self._columns: dict[str, Columns] = {}  # by key
        self._job = Columns()
        self._events = JobEvents()
        self._head: dict[str, Any] = {"state": "starting", "attempt": 0, "started": None, "ended": None, "last": None}
        self._open: set[str] = set()  # sources that have begun and not ended
        self._changed: set[str] = set()
        self._unsummed: float | None = None  # the time of the last records whose sums over processes are not made yet
        self._is_anew = True  # a snapshot is needed: the grid has changed

    @property
    def num_roles(self) -> int:
        return len(self._roles)

    @property
    def logs(self) -> dict[str, str]:
        """By key of a process: the name of its log."""
        return {key: str(role.get("log", "")) for key, role in self._roles.items()}

    def take(self, record: dict[str, Any], source: str = "") -> None:
        """Take one record; `source` names the machine whose launcher wrote it. Invalid records are skipped."""
        time = number(record.get("time"))
        if time is None:
            return
        self._head["last"] = max(time, self._head["last"] or time)
        kind = record.get("kind")
        if kind == "role":
            self._take_role(time, record)
        elif kind == "event":
            text = str(plain_text(record.get("text"))).removeprefix("[fleetrun] ")
            told = text.removeprefix(_WARNING)
            self._events.add(time, "info" if told == text else "warning", f"{source}: {told}" if source else told)
        elif kind == "start":
            self._start(time, record, source)
        elif kind == "end":
            self._end(time, record.get("finished") is True, source)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole record as JSON values. The next delta starts from here."""
        self.delta()
        grid = self._grid
        return {
            "grid": {"begin": grid.begin, "width": grid.width} if grid else None,
            "head": self._head,
            "job": _series(self._job),
            "roles": {key: {**self._told(key), "series": _series(self._columns[key])} for key in self._roles},
            "events": list(self._events.events),
            "saves": list(self._events.saves),
        }

    def delta(self) -> dict[str, Any] | None:
        """Return the changes since the last call, or None if a snapshot is needed. Applying a delta twice is harmless,
        except for events and saves."""
        self._sum()
        changed, self._changed = self._changed, set()
        events, saves = self._events.take_new()
        job, tails = self._job.tail(), {key: self._columns[key].tail() for key in sorted(changed)}
        if self._is_anew:
            self._is_anew = False
            return None
        roles = {key: {**self._told(key), "tail": tail} for key, tail in tails.items()}
        return {"head": self._head, "job": job, "roles": roles, "events": events, "saves": saves}

    def _start(self, time: float, record: dict[str, Any], source: str) -> None:
        attempt = number(record.get("attempt")) or 0
        if self._grid is None:
            self._grid = Grid(time, MOST_POINTS)
            self._head["started"] = time
        if attempt:
            self._events.add(time, "restart", f"the job was started again ({attempt})")
        self._open.add(source)
        about = {name: plain(record.get(name)) for name in ("command", "version")}
        self._head |= {"state": "running", "ended": None, "attempt": attempt, **about}

    def _end(self, time: float, is_finished: bool, source: str) -> None:
        self._open.discard(source)
        if not is_finished:
            self._head["is_cut"] = True
        if not self._open:
            is_cut = self._head.pop("is_cut", False)
            self._head |= {"state": "failed" if is_cut else "finished", "ended": time}
            self._changed |= self._roles.keys()  # those in an open state are shown as stopped from now on
            self._events.add(time, "end", "the job did not come to its end" if is_cut else "the job has finished")

    def _take_role(self, time: float, record: dict[str, Any]) -> None:
        key = plain_text(record.get("key"))
        if not key or (key not in self._roles and len(self._roles) >= _MOST_ROLES):
            return
        if self._grid is None:  # the beginning of the record is lost
            self._grid = Grid(time, MOST_POINTS)
        if time != self._unsummed:  # records of one look have the same time
            self._sum()
        before = self._roles.get(key, {})
        self._events.compare(time, key, before, record)
        if not before:
            self._columns[key] = Columns()
            self._fit(len(self._roles) + 1)
        self._roles[key] = record
        self._changed.add(key)
        for _ in range(self._grid.doublings(time)):
            self._double()
        self._columns[key].put(self._grid.point(time), _numbers(mapping(record.get("status"))))
        self._unsummed = time

    def _fit(self, num_roles: int) -> None:
        assert self._grid is not None
        self._grid.most = min(MOST_POINTS, max(_FEWEST_POINTS, _ALL_POINTS // num_roles))

    def _double(self) -> None:
        assert self._grid is not None
        self._grid.double()
        self._is_anew = True
        for columns in (self._job, *self._columns.values()):
            columns.halve()

    def _sum(self) -> None:
        """Sum over all processes, with the last record of each. A backup holds the same rows as its primary."""
        if self._unsummed is None or self._grid is None:
            return
        sums: dict[str, Value] = {}
        for role in self._roles.values():
            status = mapping(role.get("status"))
            if role.get("role") == "server":
                if not status.get("backup"):
                    _add_tables(sums, status)
            elif role.get("state") == "running" and not status.get("left"):
                _add(sums, "samples_per_s", status.get("samples_per_s"))
                _add(sums, "steps_per_s", status.get("steps_per_s"))
        self._job.put(self._grid.point(self._unsummed), sums)

    def _told(self, key: str) -> dict[str, Any]:
        role = self._roles[key]
        told = {name: plain(role.get(name)) for name in ("role", "index", "replica", "state", "returncode", "log")}
        if self._head["ended"] is not None and told["state"] in _OPEN:
            told["state"] = "stopped"
        return {**told, "restarts": plain(role.get("num_restarts", 0)), "status": plain(mapping(role.get("status")))}


def plain_text(value: Any) -> str:
    return value[:2000] if isinstance(value, str) else ""


def _numbers(status: dict[str, Any]) -> dict[str, Value]:
    """The numbers of a status that charts show, by the names of their series."""
    found: dict[str, Value] = {name: number(status.get(name)) for name in _FIELDS if name in status}
    for name, value in list(mapping(status.get("metrics")).items())[:50]:
        found[f"metrics.{name[:100]}"] = number(value)
    return found


def _add_tables(sums: dict[str, Value], status: dict[str, Any]) -> None:
    tables = mapping(status.get("tables"))
    for name, table in list(tables.items())[:60]:
        for field in ("bytes",) if mapping(table).get("is_dense") else _TABLE_FIELDS:  # the network has no rows
            _add(sums, f"{field}.{name[:100]}", mapping(table).get(field))


def _add(sums: dict[str, Value], name: str, value: Any) -> None:
    found = number(value)
    if found is not None:
        sums[name] = (sums.get(name) or 0) + found


def _series(columns: Columns) -> dict[str, Any]:
    return {"points": columns.points, "values": columns.values}
