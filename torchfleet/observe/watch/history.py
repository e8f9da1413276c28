"""The record of a run, `history.jsonl` in the folder of its logs: statuses of all processes, and what happened.

One JSON object a line, each with `time` in seconds since 1970 and `kind`:

    start   the job begins, or begins again: `command`, `attempt`, `version`
    role    a process as it is: `key`, and all fields of a RoleSnapshot, its status among them
    event   a line of the launcher: `text`
    end     the launcher ends: `finished` is true if the whole job came to its end

due_roles.py says when a process is recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from torchfleet import __version__
from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch.due_roles import DueRoles

NAME = "history.jsonl"
_MOST_TEXT = 2000  # characters of an event
_TOKEN = re.compile(r"#token=\S+")  # of the dashboard's address: a reader of the record must not get it
_MOST_LINE = 16 << 20  # bytes of a record that is read


class HistoryWriter:
    """A watcher that writes the record of a run. If the disk is full it reports that once, and the job continues."""

    def __init__(self, run_dir: Path, command: Sequence[str], attempt: int = 0) -> None:
        self._path = run_dir / NAME
        self._file: IO[str] | None = None
        self._due = DueRoles()
        self._finished = self._has_told = False
        try:
            self._file = open(self._path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            if not _ends_a_line(self._path):
                self._file.write("\n")
        except OSError as error:
            self._give_up(error)
        self._write("start", command=list(command), attempt=attempt, version=__version__)

    def look(self, snapshot: JobSnapshot) -> None:
        for role in self._due.of(snapshot):
            self._record(snapshot.time, role)

    def note(self, line: str, is_event: bool) -> None:
        if is_event:
            self._write("event", text=_TOKEN.sub("", line)[:_MOST_TEXT])

    def end(self, snapshot: JobSnapshot) -> None:
        self._finished = True
        for role in snapshot.roles:
            self._record(snapshot.time, role)

    def close(self) -> None:
        self._write("end", finished=self._finished)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _record(self, now: float, role: RoleSnapshot) -> None:
        self._write("role", now, key=role.key, **vars(role))

    def _write(self, kind: str, now: float | None = None, **fields: Any) -> None:
        file = self._file
        if file is None:
            return
        when = time.time() if now is None else now
        try:
            file.write(json.dumps({"time": round(when, 3), "kind": kind, **fields}) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        if not self._has_told:
            self._has_told = True
            tell(f"[fleetrun] {self._path} cannot be written: {error}. The job goes on, and the rest is not recorded.")


class HistoryReader:
    """Reads a record while it grows. Invalid lines, such as a torn one, are skipped."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._offset = run_dir / NAME, 0

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the complete lines written since the last call."""
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            while line := file.readline(_MOST_LINE):
                if not line.endswith(b"\n") and len(line) < _MOST_LINE:
                    return  # the rest of the line is not written yet
                self._offset += len(line)
                with contextlib.suppress(ValueError, RecursionError):
                    found = json.loads(line)
                    if isinstance(found, dict) and isinstance(found.get("time"), (int, float)) and "kind" in found:
                        yield found


def _ends_a_line(path: Path) -> bool:
    """Whether the file ends with a newline: an earlier attempt may have left half a line when the disk was full."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")
