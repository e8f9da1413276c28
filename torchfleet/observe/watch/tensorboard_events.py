"""Event files for TensorBoard: a run for each process, and one, `job`, for all of them together.

    DIR/2026-11-16_15-04-05_4711/job            means of the workers' metrics, sums of their speeds
    DIR/2026-11-16_15-04-05_4711/worker.0       its metrics, speed, waits, memory
    DIR/2026-11-16_15-04-05_4711/server.0       requests, load, rows and bytes of tables, staleness

Values are shown by step: those of a worker or rank by its own steps, those of a server and of the job by the steps of
the worker that has made the most. They are written at the moments at which history.jsonl records them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchfleet.base.monitor.freshness import last_age, median, summed
from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch.due_roles import DueRoles
from torchfleet.observe.watch.job_totals import is_training, means

JOB = "job"
# The tag of a field of a status that is one number.
FIELDS = {
    "steps_per_s": "speed/steps_per_s",
    "samples_per_s": "speed/samples_per_s",
    "pull_wait_ms": "waits/pull_ms",
    "push_wait_ms": "waits/push_ms",
    "waiting": "waits/share",
    "queue": "queue/steps",
    "retries": "requests/retries",
    "requests_per_s": "requests/per_s",
    "errors": "requests/errors",
    "busy": "server/busy",
    "passes": "heter/passes",
    "sessions": "heter/sessions",
    "memory": "memory/resident_bytes",
}
_SUMMED = ("steps_per_s", "samples_per_s")  # over workers, in the run of the job
_KINDS = ("dense", "sparse")
_FLUSH = 10  # seconds that events may wait for the disk
_ENDLESS = 0  # no limit on events that wait for the disk: the launcher's loop never waits for it


def scalars_of(role: RoleSnapshot) -> dict[str, float]:
    """The numbers of a process, by tag."""
    status = role.status
    found = {tag: status[field] for field, tag in FIELDS.items() if isinstance(status.get(field), (int, float))}
    found |= {f"metrics/{name}": value for name, value in role.metrics.items()}
    found |= {f"rows/{name}": num for name, num in status.get("rows", {}).items()}
    found |= {f"bytes/{name}": table["bytes"] for name, table in status.get("tables", {}).items() if "bytes" in table}
    for kind in _KINDS:
        middle = median(summed([status.get(f"staleness_{kind}", {})]))
        if middle is not None:
            found[f"staleness/{kind}_median"] = middle
    return found


def scalars_of_job(snapshot: JobSnapshot) -> dict[str, float]:
    """Means of the metrics that workers or ranks have reported, and the speeds of those that train, as the display has
    them."""
    workers = snapshot.training
    found = {f"metrics/{name}": value for name, value in means(role.metrics for role in workers).items()}
    training = [role.status for role in workers if is_training(role)]
    for field in _SUMMED:
        rates = [status[field] for status in training if isinstance(status.get(field), (int, float))]
        if rates:
            found[FIELDS[field]] = sum(rates)
    return found


class TensorBoardEvents:
    """A watcher that writes event files. If writing fails it reports that once, and the job continues."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._folder, self._due, self._writers = folder, DueRoles(), dict[str, _Run]()
        self._is_on = True
        self._guarded(lambda: self._run(JOB).text("command", shlex.join(command), 0))

    def look(self, snapshot: JobSnapshot) -> None:
        self._guarded(lambda: self._write(snapshot, self._due.of(snapshot)))

    def note(self, line: str, is_event: bool) -> None:
        """Does nothing: lines are in the logs."""

    def end(self, snapshot: JobSnapshot) -> None:
        self._guarded(lambda: self._write(snapshot, snapshot.roles))

    def close(self) -> None:
        for run in self._writers.values():
            self._guarded(run.close)

    def _write(self, snapshot: JobSnapshot, roles: Sequence[RoleSnapshot]) -> None:
        step = max((role.status.get("steps", 0) for role in snapshot.roles), default=0)
        for role in roles:
            if role.status:
                own = role.status.get("steps", step)
                self._run(role.key).write(scalars_of(role), _ages_of(role), own, snapshot.time)
        if any(role.status for role in snapshot.training if role in roles):
            self._run(JOB).write(scalars_of_job(snapshot), {}, step, snapshot.time)

    def _run(self, key: str) -> _Run:
        if key not in self._writers:
            self._writers[key] = _Run(self._folder / key)
        return self._writers[key]

    def _guarded(self, work: Callable[[], None]) -> None:
        if not self._is_on:
            return
        try:
            work()
        except Exception as error:  # tensorboard may raise anything from its files and threads
            self._is_on = False
            tell(f"[fleetrun] {self._folder} cannot be written: {error}. The job goes on without event files.")


def _ages_of(role: RoleSnapshot) -> dict[str, Mapping[int, int]]:
    found = {f"staleness/{kind}": summed([role.status.get(f"staleness_{kind}", {})]) for kind in _KINDS}
    return {tag: ages for tag, ages in found.items() if ages}


class _Run:
    """One folder of event files, which a thread of tensorboard's writes."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), max_queue_size=_ENDLESS, flush_secs=_FLUSH)

    def write(
        self, scalars: Mapping[str, float], histograms: Mapping[str, Mapping[int, int]], step: int, now: float
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        values += [Summary.Value(tag=tag, histo=_histogram(ages)) for tag, ages in histograms.items()]
        if values:
            self._add(Summary(value=values), step, now)

    def text(self, tag: str, text: str, step: int) -> None:
        import time

        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(tag, text), step, time.time())

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: Any, step: int, now: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=now, step=step, summary=summary))


def _histogram(ages: Mapping[int, int]) -> Any:
    """Make a histogram of staleness. Its sums take a key as the staleness, so they are exact below EXACT_AGES only."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    return HistogramProto(
        min=min(ages),
        max=last_age(max(ages)),
        num=sum(ages.values()),
        sum=sum(age * num for age, num in ages.items()),
        sum_squares=sum(age * age * num for age, num in ages.items()),
        bucket_limit=[last_age(age) for age in sorted(ages)],
        bucket=[ages[age] for age in sorted(ages)],
    )
