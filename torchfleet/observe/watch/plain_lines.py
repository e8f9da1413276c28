"""Shows a job without a terminal, in few lines: a line is printed when something has changed."""

from __future__ import annotations

from collections import Counter

from torchfleet.base.monitor.snapshot import JobSnapshot
from torchfleet.observe.watch import figures
from torchfleet.observe.watch.job_totals import JobTotals, totals_of

PERIOD = 5.0  # seconds between two lines about the job


class PlainLines:
    """Returns lines about changes since the last call."""

    def __init__(self) -> None:
        self._is_begun = self._is_running = False
        self._next, self._last = PERIOD, ""

    def look(self, snapshot: JobSnapshot, elapsed: float, new_warnings: list[str]) -> list[str]:
        """`elapsed`: seconds since the job began."""
        lines = [*self._start(snapshot, elapsed), *(f"warning: {text}" for text in new_warnings)]
        if elapsed >= self._next:
            self._next = elapsed + PERIOD
            text = job_line(snapshot)
            if text and text != self._last:
                self._last = text
                lines.append(f"{_time(elapsed)}  {text}")
        return lines

    def _start(self, snapshot: JobSnapshot, elapsed: float) -> list[str]:
        lines = []
        is_starting = any(role.state == "starting" for role in snapshot.roles)
        if not self._is_begun:
            self._is_begun = True
            if is_starting:
                lines.append(f"starting {_counted(snapshot)}")
            else:
                self._is_running = True
                lines.append(f"{_counted(snapshot)} started")
        if not self._is_running and not is_starting:
            self._is_running = True
            lines.append(f"all running after {elapsed:.1f} s")
        return lines


def job_line(snapshot: JobSnapshot) -> str:
    """Return a line about the current state of the job; empty while nothing is known."""
    totals, parts = totals_of(snapshot), []
    if not (totals.samples or totals.metrics or totals.rows):
        return ""
    if totals.progress is not None:
        parts.append(totals.progress.text)
    parts += filter(None, [speed(totals)])
    if totals.metrics:
        parts.append(" ".join(totals.shown_metrics))
    if held := _held(totals):
        parts.append(held)
    workers = snapshot.training
    num_done = sum(role.state == "done" for role in workers)
    if parts and 0 < num_done < len(workers):
        parts.append(f"{num_done} of {figures.plural(len(workers), workers[0].role)} done")
    return " | ".join(parts)


def speed(totals: JobTotals) -> str:
    """Return the speed now and on average; only the latter once no worker trains; "" if none is known."""
    mean = figures.rate(totals.mean_rate)
    if totals.samples and totals.is_training:
        return f"{figures.rate(totals.rate)} samples/s (mean {mean})"
    return f"mean {mean} samples/s" if totals.mean_rate else ""


def end_lines(snapshot: JobSnapshot, elapsed: float) -> list[str]:
    """Return the lines about the result of the job. `elapsed`: seconds since the job began, of which training is a
    part.
    """
    totals, lines = totals_of(snapshot), []
    if totals.samples:
        told = [f"{figures.count(totals.samples)} samples"]
        if totals.training_s:
            told[0] += f" in {figures.seconds(totals.training_s)} of training"
            told.append(f"{figures.rate(totals.mean_rate)} samples/s")
        lines.append(f"{', '.join([*told, *totals.shown_metrics])}; the job took {_time(elapsed)}")
    if totals.rows is not None:
        tables = figures.plural(totals.num_tables, "table")
        memory = f"; servers used {figures.size(totals.server_memory)} of memory" if totals.server_memory else ""
        if totals.have_compiled:
            memory += ", compiler included: this was the first start with such tables on this machine"
        lines.append(f"{figures.count(totals.rows)} rows in {tables}, {figures.size(totals.table_bytes)}{memory}")
    return lines


def _held(totals: JobTotals) -> str:
    parts = [f"{figures.count(totals.rows)} rows"] if totals.rows is not None else []
    parts += [f"servers busy {figures.share(totals.busy)}"] if totals.busy is not None else []
    parts += [f"workers wait {figures.share(totals.waiting)}"] if totals.waiting is not None else []
    return ", ".join(parts)


def _counted(snapshot: JobSnapshot) -> str:
    nums = Counter(role.role for role in snapshot.roles)
    return ", ".join(figures.plural(num, role) for role, num in nums.items())


def _time(elapsed: float) -> str:
    return f"{elapsed:.0f} s" if elapsed < 100 else figures.duration(elapsed)
