"""The progress of a job's processes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchfleet.cgroups import usable_cores
from torchfleet.guard.printable import bare, printable
from torchfleet.monitor.job_load import JobLoad
from torchfleet.monitor.snapshot import JobSnapshot, RoleSnapshot

_PERIOD = 5.0  # seconds between plain lines


class Display:
    """A watcher that shows processes until it is closed. Lines given to `note` stand above the table."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._next = time.monotonic() + _PERIOD
        self._load = JobLoad(usable_cores())

    def note(self, line: str, is_event: bool) -> None:
        """Show a line, which may come from a process: without what commands a terminal, but for colours."""
        shown = printable(line)
        if self._live:
            self._live.console.print(Text.from_ansi(shown))
        else:
            print(shown, flush=True)

    def look(self, snapshot: JobSnapshot) -> None:
        running = {
            (role.role, role.index): role.status
            for role in snapshot.roles
            if role.returncode is None and not role.status.get("backup")
        }
        told = self._load.look(running)
        if self._live:
            self._live.update(Group(_table(snapshot), Text(told)))
        elif time.monotonic() >= self._next:
            self._show_line(snapshot, told)

    def end(self, snapshot: JobSnapshot) -> None:
        """How the job ended, which stays readable after the table is gone, and what it waited for on the whole."""
        told = self._load.whole()
        self._show_line(snapshot, f"on the whole: {told}" if told else "")

    def _show_line(self, snapshot: JobSnapshot, told: str) -> None:
        self._next = time.monotonic() + _PERIOD
        self.note("[fleetrun] " + "; ".join(map(_line, snapshot.roles)), True)
        if told:
            self.note(f"[fleetrun] {told}", True)

    def close(self) -> None:
        if self._live:
            self._live.stop()


def _state(role: RoleSnapshot) -> str:
    return f"ended with {role.returncode}" if role.state == "failed" else role.state


def _line(role: RoleSnapshot) -> str:
    status = role.status
    if role.role == "server":
        rows = sum(status.get("rows", {}).values())
        return f"{role.name}: {_state(role)}, {rows:,} rows"
    speed = f", step {status['steps']:,}, {status['samples_per_s']:,.0f} samples/s" if "steps" in status else ""
    return f"{role.name}: {_state(role)}{speed}{_metrics(role)}"


def _metrics(role: RoleSnapshot) -> str:
    return "".join(f", {bare(name)} {value:.4f}" for name, value in role.metrics.items())


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _table(snapshot: JobSnapshot) -> Table:
    table = Table()
    loads = ("waits", "busy") if snapshot.of("server") else ()
    for heading in ("role", "state", "steps", "steps/s", "samples/s", "queue", *loads, "metrics", "rows"):
        table.add_column(heading, justify="left" if heading in ("role", "state", "metrics", "rows") else "right")
    for role in snapshot.roles:
        status = role.status
        rows = ", ".join(f"{bare(name)} {num:,}" for name, num in status.get("rows", {}).items())
        table.add_row(
            role.name,
            _state(role),
            f"{status['steps']:,}" if "steps" in status else "",
            f"{status['steps_per_s']:.1f}" if "steps_per_s" in status else "",
            f"{status['samples_per_s']:,.0f}" if "samples_per_s" in status else "",
            str(status.get("queue", "")),
            *([_share(status.get("waiting")), _share(status.get("busy"))] if loads else []),
            Text(_metrics(role).removeprefix(", ")),  # not markup, whatever a name looks like
            Text(rows),
        )
    return table
