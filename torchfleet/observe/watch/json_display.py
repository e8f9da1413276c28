"""The launcher's own lines as JSON, with --log_format json: in the place of the display."""

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
_ROLE = re.compile(r"\[(server|worker|rank) (\d+)(?:, replica (\d+))?\] (.*)", re.DOTALL)
_QUOTED = "    "  # before the last lines of a process that has failed
_FAILED = ("the job ends", "the simulation ends")


def line_printer(watching: Watching) -> Callable[[str], None]:
    """Prints lines of the launcher, as text or as JSON."""
    return print_json if watching.is_json else print_text


def print_text(line: str) -> None:
    print(line, flush=True)


def print_json(line: str) -> None:
    """`[worker 0] text` is a line of that process, any other one of the launcher."""
    role = _ROLE.fullmatch(line)
    if role is not None:
        made = json_line(role[4], role[1], int(role[2]), int(role[3] or 0))
    else:
        is_bad = line.startswith(_QUOTED) or any(words in line for words in _FAILED)
        text = line.removeprefix(_OWN).removeprefix(_QUOTED)
        level = "error" if is_bad else "warning" if line.startswith(WARNING) else None
        made = json_line(text, "fleetrun", 0, level=level)
    sys.stdout.write(f"{made}\n")  # at once: threads print, too
    sys.stdout.flush()


class JsonDisplay:
    """A watcher that prints what is said, what is off, and what the job has come to. It shows no progress:
    history.jsonl and the metrics have that."""

    def __init__(self, log_dir: Path, warn: Callable[[str], None]) -> None:
        """`warn`: is told what is off, too."""
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
        for line in end_lines(snapshot, snapshot.time - (self._started or snapshot.time)):
            self.note(f"{_OWN}{line}", True)

    def close(self) -> None:
        """Nothing is held."""
