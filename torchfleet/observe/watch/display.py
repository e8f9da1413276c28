"""What a person sees of a job: at a terminal a display that changes in place, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.monitor.job_load import JobLoad
from torchfleet.base.monitor.snapshot import JobSnapshot
from torchfleet.base.printable import printable
from torchfleet.observe.watch.job_warnings import JobWarnings
from torchfleet.observe.watch.plain_lines import PlainLines, end_lines
from torchfleet.observe.watch.reader_gone import Shown
from torchfleet.observe.watch.screen import Screen

_PERIOD = 0.95  # seconds between two looks: drawing is what costs most
_FOR_THE_LOG = 4  # of the screen's height, the part that is left to lines of the job


class Display:
    """A watcher that shows processes until it is closed. Lines given to `note` stand above what changes in place.

    When nobody reads any more, as behind `| head`, the job goes on and nothing is shown.
    """

    def __init__(
        self, log_dir: Path | None = None, verbose: bool = False, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """`warn`: is told what is off, too."""
        self._warn = warn
        self._safely = Shown()  # `note` is called from other threads, too
        self._console = _Console(file=sys.stdout)
        self._live: Live | None = None
        self._started: float | None = None  # the time of the first snapshot
        self._looked = 0.0
        self._load, self._plain = JobLoad(usable_cores()), PlainLines()
        self._screen, self._warnings = Screen(_short(log_dir), verbose), JobWarnings(log_dir)
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._safely.is_gone:
            self._safely(self._begin)

    def note(self, line: str, is_event: bool) -> None:
        """Show a line, which may come from a process: without what commands a terminal, but for colours."""
        shown = printable(line)
        if self._live is not None:
            self._safely(lambda: self._console.print(Text.from_ansi(shown)))
        else:
            self._safely(lambda: print(shown, flush=True))

    def look(self, snapshot: JobSnapshot) -> None:
        if self._started is None:
            self._started = snapshot.time
        if 0 <= snapshot.time - self._looked < _PERIOD:
            return
        self._looked = snapshot.time
        running = {
            (role.role, role.index): role.status
            for role in snapshot.roles
            if role.returncode is None and not role.status.get("backup")
        }
        told, warnings = self._load.look(running), self._warnings.look(snapshot)
        for text in self._warnings.new:
            self._warn(text)
        elapsed = snapshot.time - self._started
        if self._live is not None:
            self._safely(lambda: self._draw(snapshot, elapsed, warnings, told))
            return
        for line in self._plain.look(snapshot, elapsed, self._warnings.new):
            self.note(f"[fleetrun] {line}", True)

    def end(self, snapshot: JobSnapshot) -> None:
        """What the job has come to, which stays readable after the display is gone, and what it waited for."""
        for line in end_lines(snapshot, snapshot.time - (self._started or snapshot.time)):
            self.note(f"[fleetrun] {line}", True)
        if told := self._load.whole():
            self.note(f"[fleetrun] on the whole: {told}", True)

    def close(self) -> None:
        if self._live is not None:
            self._safely(self._live.stop)

    def _begin(self) -> None:
        self._size = self._console.size
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def _draw(self, snapshot: JobSnapshot, elapsed: float, warnings: list[str], told: str) -> None:
        assert self._live is not None
        if self._console.size != self._size:  # what was drawn is wrapped now: nobody knows how many lines it has
            self._live.stop()
            self._console.clear()
            self._begin()
        width, height = self._console.size
        most = height - max(1, height // _FOR_THE_LOG)
        lines = self._screen.lines(snapshot, elapsed, warnings, told, width, most)
        self._live.update(Group(*lines), refresh=True)


def _short(folder: Path | None) -> str:
    """As it is from here, if it is below this folder."""
    if folder is None:
        return ""
    with contextlib.suppress(OSError, ValueError):  # elsewhere; or this folder is gone
        return str(folder.relative_to(Path.cwd()))
    return str(folder)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Not the end of the process, as it is by default: it has a job to run."""
        raise BrokenPipeError
