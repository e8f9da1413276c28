"""The display of a job: updated in place at a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.text import Text

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.monitor.bottleneck import Machine, bottleneck
from torchfleet.base.monitor.snapshot import JobSnapshot
from torchfleet.base.printable import printable
from torchfleet.observe.watch.job_warnings import JobWarnings
from torchfleet.observe.watch.plain_lines import PlainLines, end_lines
from torchfleet.observe.watch.reader_gone import Shown
from torchfleet.observe.watch.screen import Screen

_PERIOD = 0.95  # seconds between two updates: drawing costs most
Name = tuple[str, int]  # role and index of a process
_FOR_THE_LOG = 4  # the screen's height divided by this is left for lines of the job


class Display:
    """A watcher that shows processes until it is closed. Lines given to `note` appear above the part updated in place.

    When the reader of the output is gone, as with `| head`, the job continues and nothing is shown.
    """

    def __init__(
        self, log_dir: Path | None = None, verbose: bool = False, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """`warn` also receives each warning."""
        self._warn, self._log_dir = warn, log_dir
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
        """Show a line, which may come from a process. Terminal control sequences except colours are removed."""
        shown = printable(line)
        if self._live is not None:
            text = Text.from_ansi(shown)
            if is_event and self._log_dir is not None:
                link_logs(text, self._log_dir)
            self._safely(lambda: self._console.print(text))
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
        """Show the result of the job and what it waited for. These lines stay after the display is closed."""
        lines = end_lines(snapshot, snapshot.time - (self._started or snapshot.time))
        for line in (*lines, *self._warnings.backups.report()):
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
        if self._console.size != self._size:  # the terminal wrapped the drawn lines: their number is unknown
            self._live.stop()
            self._console.clear()
            self._begin()
        width, height = self._console.size
        most = height - max(1, height // _FOR_THE_LOG)
        lines = self._screen.lines(snapshot, elapsed, warnings, told, width, most)
        self._live.update(Group(*lines), refresh=True)


def link_logs(text: Text, log_dir: Path) -> None:
    """Make the paths of logs in this folder links to the files, which many terminals open by a click."""
    for found in re.finditer(rf"{re.escape(str(log_dir))}/(?:worker|server|heter)log[\w.-]*\w", text.plain):
        text.stylize(Style(link=Path(found[0]).absolute().as_uri()), *found.span())


def _short(folder: Path | None) -> str:
    """Return the path relative to the current folder if it is below it."""
    if folder is None:
        return ""
    with contextlib.suppress(OSError, ValueError):  # not below it, or the current folder is gone
        return str(folder.relative_to(Path.cwd()))
    return str(folder)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Do not exit, which is the default: the launcher has a job to run."""
        raise BrokenPipeError


class JobLoad:
    """Collects the time shares that servers and workers of this machine report while they run."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores, self._num_processes = num_cores, 0
        self._is_sync = False
        self._sums: dict[Name, float] = defaultdict(float)  # of all looks
        self._num_looks: dict[Name, int] = defaultdict(int)

    def look(self, statuses: Mapping[Name, Mapping[str, Any]]) -> str:
        """Take the last status of every process. Returns what the job waits for now, or "" while that is not known.

        The text has no shares: the display shows them next to it.
        """
        self._num_processes = max(self._num_processes, len(statuses))  # the number never falls when processes end
        now: dict[Name, float] = {}
        for name, status in statuses.items():
            self._is_sync |= status.get("mode") == "sync"
            share = status.get("busy" if name[0] == "server" else "waiting")
            if isinstance(share, (int, float)) and not status.get("left"):
                now[name] = share
        if len({role for role, _ in now}) == 2:  # a server that waits for the first worker is not idle
            for name, share in now.items():
                self._sums[name] += share
                self._num_looks[name] += 1
        return self._sentence(now, tells_shares=False)

    def whole(self) -> str:
        """Return what the job waited for, averaged over all calls of `look`."""
        return self._sentence({name: total / self._num_looks[name] for name, total in self._sums.items()})

    def _sentence(self, shares: Mapping[Name, float], tells_shares: bool = True) -> str:
        busy, waits = ([share for (role, _), share in shares.items() if role == it] for it in ("server", "worker"))
        return bottleneck(busy, waits, Machine(self._num_cores, self._num_processes), self._is_sync, tells_shares)
