"""Prints the launcher's own lines as JSON instead of the display, with --log_format json."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from torchfleet.base.monitor.json_lines import json_line
from torchfleet.base.monitor.snapshot import JobSnapshot
from torchfleet.observe.watch.job_warnings import JobWarnings
from torchfleet.observe.watch.plain_lines import end_lines
from torchfleet.observe.watch.reader_gone import Shown
from torchfleet.observe.watch.watchers import Watching

WARNING = "[fleetrun] warning: "
_OWN = "[fleetrun] "
_PERIOD = 0.95  # seconds between two looks
_ROLE = re.compile(r"\[(server|worker|heter_worker|rank) (\d+)(?:, replica (\d+))?\] (.*)", re.DOTALL)
_QUOTED = "    "  # before the last lines of a process that has failed
_FAILED = ("the job ends", "the simulation ends")


def line_printer(watching: Watching) -> Callable[[str], None]:
    """Return a function that prints lines of the launcher as text or as JSON."""
    return print_json if watching.is_json else print_text


def print_text(line: str) -> None:
    print(line, flush=True)


def print_json(line: str) -> None:
    """Print a line as JSON. `[worker 0] text` is a line of that process; any other is a line of the launcher."""
    role = _ROLE.fullmatch(line)
    if role is not None:
        made = json_line(role[4], role[1], int(role[2]), int(role[3] or 0))
    else:
        is_bad = line.startswith(_QUOTED) or any(words in line for words in _FAILED)
        text = line.removeprefix(_OWN).removeprefix(_QUOTED)
        level = "error" if is_bad else "warning" if line.startswith(WARNING) else None
        made = json_line(text, "fleetrun", 0, level=level)
    sys.stdout.write(f"{made}\n")  # in one write, since other threads print, too
    sys.stdout.flush()


class JsonDisplay:
    """A watcher that prints lines, warnings and the result of the job. It prints no progress, which history.jsonl and
    the metrics contain."""

    def __init__(self, log_dir: Path, warn: Callable[[str], None]) -> None:
        """`warn` also receives each warning."""
        self._safely, self._warn = Shown(), warn
        self._warnings, self._started, self._looked = JobWarnings(log_dir), 0.0, 0.0

    def look(self, snapshot: JobSnapshot) -> None:
        self._started = self._started or snapshot.time
        if 0 <= snapshot.time - self._looked < _PERIOD:
            return
        self._looked = snapshot.time
        self._warnings.look(snapshot)
        for text in self._warnings.new:
            self.note(f"{WARNING}{text}", True)
            self._warn(text)

    def note(self, line: str, is_event: bool) -> None:
        self._safely(lambda: print_json(line))

    def end(self, snapshot: JobSnapshot) -> None:
        lines = end_lines(snapshot, snapshot.time - (self._started or snapshot.time))
        for line in (*lines, *self._warnings.backups.report()):
            self.note(f"{_OWN}{line}", True)

    def close(self) -> None:
        """Does nothing: it holds no resources."""
