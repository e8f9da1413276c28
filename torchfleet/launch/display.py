"""The progress of a job's processes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchfleet.cgroups import usable_cores
from torchfleet.guard.printable import bare, printable
from torchfleet.launch.job_spec import RunningTask
from torchfleet.monitor.job_load import JobLoad
from torchfleet.monitor.status import KNOWN

_PERIOD = 5.0  # seconds between plain lines


class Display:
    """Shows processes until it is closed. Lines given to `report` stand above the table."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._next = time.monotonic() + _PERIOD
        self._load = JobLoad(usable_cores())

    def report(self, line: str) -> None:
        """Show a line, which may come from a process: without what commands a terminal, but for colours."""
        shown = printable(line)
        if self._live:
            self._live.console.print(Text.from_ansi(shown))
        else:
            print(shown, flush=True)

    def show(self, processes: Sequence[RunningTask]) -> None:
        reported = ((p, p.status()) for p in processes if p.returncode is None)
        running = {(p.task.role, p.task.index): status for p, status in reported if not status.get("backup")}
        told = self._load.look(running)
        if self._live:
            self._live.update(Group(_table(processes), Text(told)))
        elif time.monotonic() >= self._next:
            self._show_line(processes, told)

    def show_end(self, processes: Sequence[RunningTask]) -> None:
        """How the job ended, which stays readable after the table is gone, and what it waited for on the whole."""
        told = self._load.whole()
        self._show_line(processes, f"on the whole: {told}" if told else "")

    def _show_line(self, processes: Sequence[RunningTask], told: str) -> None:
        self._next = time.monotonic() + _PERIOD
        self.report("[fleetrun] " + "; ".join(_line(process) for process in processes))
        if told:
            self.report(f"[fleetrun] {told}")

    def close(self) -> None:
        if self._live:
            self._live.stop()


def state(process: RunningTask) -> str:
    code = process.returncode
    if code is None:
        return "running" if process.status() else "starting"
    return "done" if code == 0 else f"ended with {code}"


def _line(process: RunningTask) -> str:
    status = process.status()
    if process.task.role == "server":
        rows = sum(status.get("rows", {}).values())
        return f"{process.task.name}: {state(process)}, {rows:,} rows"
    speed = f", step {status['steps']:,}, {status['samples_per_s']:,.0f} samples/s" if "steps" in status else ""
    return f"{process.task.name}: {state(process)}{speed}{_metrics(status)}"


def _metrics(status: dict[str, Any]) -> str:
    return "".join(f", {bare(name)} {value:.4f}" for name, value in status.items() if name not in KNOWN)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _table(processes: Sequence[RunningTask]) -> Table:
    table = Table()
    loads = ("waits", "busy") if any(process.task.role == "server" for process in processes) else ()
    for heading in ("role", "state", "steps", "steps/s", "samples/s", "queue", *loads, "metrics", "rows"):
        table.add_column(heading, justify="left" if heading in ("role", "state", "metrics", "rows") else "right")
    for process in processes:
        status = process.status()
        rows = ", ".join(f"{bare(name)} {num:,}" for name, num in status.get("rows", {}).items())
        table.add_row(
            process.task.name,
            state(process),
            f"{status['steps']:,}" if "steps" in status else "",
            f"{status['steps_per_s']:.1f}" if "steps_per_s" in status else "",
            f"{status['samples_per_s']:,.0f}" if "samples_per_s" in status else "",
            str(status.get("queue", "")),
            *([_share(status.get("waiting")), _share(status.get("busy"))] if loads else []),
            Text(_metrics(status).removeprefix(", ")),  # not markup, whatever a name looks like
            Text(rows),
        )
    return table
