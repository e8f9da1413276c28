"""The pass loop of online learning: evaluates, trains and saves each part of a source, once and in order."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

import torchfleet as fleet
from torchfleet.api import current_job
from torchfleet.api.metrics import AUC
from torchfleet.apps.online.agreement import NEXT_PART, gather_at
from torchfleet.apps.online.parts import Part, Source
from torchfleet.apps.online.pass_progress import KEPT, PassProgress, PassReport, Result, extra_of, saved_progress
from torchfleet.apps.online.validation import auc_of_all
from torchfleet.base.errors import CheckpointError, FleetError, ServerRestarted, ServerUnreachable
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage

BEAT = 10.0  # seconds after which worker 0 replies to the others without a part, so that they do not time out

_saved_here: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by job: the folder of its last save

Train = Callable[[Part, list[str]], Any]
Evaluate = Callable[[Part, list[str]], AUC | None]


def train_passes(
    source: Source,
    model_dir: str,
    train: Train,
    *,
    evaluate: Evaluate | None = None,
    on_pass: Callable[[PassReport], None] | None = None,
    shrink: bool = False,
    poll_seconds: float = 5.0,
    max_passes: int | None = None,
    all_files: bool = False,
) -> list[PassReport]:
    """Train on every part of `source` once, in order, and save after each, until the end of the source or `max_passes`.

    All workers call it, after fleet.init_worker. For each part, it first calls `evaluate(part, files)`, if given; the
    AUC over all workers is measured before any worker has trained on the part. Then it calls `train(part, files)`. Then
    it saves the model to `model_dir`: a full save for the first part of a day, else a delta. `files` are this worker's.
    With `all_files`, `train` gets the files of all workers: sync mode requires the same number of steps on all workers,
    which holds if each reads all files and takes its share of each batch.

    `on_pass` is called with the report of each pass, and worker 0 polls the source every `poll_seconds`. With `shrink`,
    rows are evicted by the tables' own policies once a day, before the full save.

    The saved model contains each part exactly once: the position in the source is saved atomically with the model. A
    restarted script (with fleet.init_server(online.model_to_load(model_dir)), and the same for init_worker) continues
    from the last complete pass. An error on one worker ends the loop on all workers, and names the part.

    Returns the last 1000 reports.
    """
    loop = _Loop(source, model_dir, train, evaluate, on_pass, shrink, poll_seconds, all_files)
    try:
        return loop.run(max_passes)
    except (ServerUnreachable, ServerRestarted):
        raise
    except Exception:
        with contextlib.suppress(Exception):
            fleet.stop_worker()  # the others must not wait for this worker: they find it missing at the next barrier
        raise


class _Loop:
    """One call of train_passes on one worker."""

    def __init__(
        self,
        source: Source,
        model_dir: str,
        train: Train,
        evaluate: Evaluate | None,
        on_pass: Callable[[PassReport], None] | None,
        shrink: bool,
        poll_seconds: float,
        all_files: bool,
    ) -> None:
        if poll_seconds <= 0:
            raise FleetError(f"poll_seconds: expected a number above 0, found {poll_seconds!r}")
        self._source, self._model_dir = source, model_dir
        self._train, self._evaluate, self._on_pass = train, evaluate, on_pass
        self._shrink, self._poll_seconds, self._all_files = shrink, poll_seconds, all_files
        self._is_first = fleet.is_first_worker()
        self._next_poll = 0.0
        self._is_waiting = False  # whether the wait was reported
        self._part = ""  # the last part of this run
        self._has_saved = False
        self._own: list[str] = []  # this worker's files
        self._files_for = ""  # the part of `_own`
        self._progress = PassProgress()  # kept by worker 0

    def run(self, max_passes: int | None) -> list[PassReport]:
        _refuse_restarted_worker()
        if self._is_first:
            self._progress = self._resumed()
        reports: deque[PassReport] = deque(maxlen=KEPT)
        num = 0
        while max_passes is None or num < max_passes:
            part = self._next_part()
            if part is None:
                break
            reports.append(self._pass(part))
            num += 1
            if self._on_pass is not None:
                self._on_pass(reports[-1])
        return list(reports)

    def _resumed(self) -> PassProgress:
        """The saved progress. Raises FleetError if the servers have not loaded the corresponding model."""
        if fleet.saved_extra(self._model_dir) is None:
            return PassProgress()
        wanted = Storage(self._model_dir).path
        for number, server in enumerate(fleet.stats()["servers"]):
            if wanted not in (server["model"], _saved_here.get(current_job.get_job())):
                raise FleetError(
                    f"there is a model in {self._model_dir} to go on from, but server {number} has loaded "
                    f"{server['model'] or 'none'}. Write fleet.init_server(online.model_to_load(model_dir)), and "
                    "fleet.init_worker alike; or give another model_dir to begin anew."
                )
        progress = saved_progress(self._model_dir)
        if progress.passes:
            print(f"going on after part {progress.part}, pass {progress.passes}", flush=True)
        return progress

    def _next_part(self) -> Part | None:
        """Wait, with all workers, for the next part; None at the end of the source."""
        while True:
            found = self._poll() if self._is_first else None
            kind, part = gather_at(NEXT_PART, self._part, found)[0]
            if kind == "over":
                return None
            if kind == "part":
                return msgspec.convert(part, prepared(Part))

    def _poll(self) -> tuple[str, Any]:
        """On worker 0: poll the source for up to BEAT seconds. ("part", the part), ("over", None) or ("wait", None)."""
        deadline = time.monotonic() + BEAT
        while (now := time.monotonic()) < deadline:
            if now >= self._next_poll:
                part = self._source.next(self._progress.position)
                if part is not None:
                    self._is_waiting, self._next_poll = False, 0.0
                    fleet.set_time(part.time)  # no worker trains at this point
                    return "part", msgspec.to_builtins(part)
                if self._source.is_over(self._progress.position):
                    return "over", None
                self._report_waiting()
                self._next_poll = now + self._poll_seconds
            time.sleep(max(0.0, min(self._next_poll, deadline) - time.monotonic()))
        return "wait", None

    def _report_waiting(self) -> None:
        if not self._is_waiting:
            behind = f"after {self._progress.part}" if self._progress.part else "of all"
            print(f"waiting for the first part {behind}", flush=True)
            self._is_waiting = True

    def _pass(self, part: Part) -> PassReport:
        start = time.monotonic()
        self._part = part.name
        auc, samples = None, None
        if self._evaluate is not None:  # no worker trains before all have evaluated
            auc, samples = auc_of_all(self._evaluate(part, self._own_files(part)), part.name)
        files = self._source.files_of(part, 0, 1) if self._all_files else self._own_files(part)
        begin, before = time.monotonic(), _num_samples()
        self._train(part, files)
        fleet.flush()
        trained = sum(gather_at("trained", part.name, _num_samples() - before))
        samples = trained if samples is None else samples
        rate = samples / max(time.monotonic() - begin, 1e-9)
        report = self._saved(part, auc, samples, rate, start)
        self._own = []
        self._source.done(part)
        if report.auc is not None:
            fleet.report(auc=report.auc)
        return report

    def _own_files(self, part: Part) -> list[str]:
        """This worker's files of the part. Requested once, since a source may have to fetch them."""
        if self._files_for != part.name:
            self._files_for = part.name
            self._own = self._source.files_of(part, fleet.worker_index(), fleet.worker_num())
        return list(self._own)

    def _saved(self, part: Part, auc: float | None, samples: int, rate: float, start: float) -> PassReport:
        """Save on worker 0 while the others wait; all return the same report."""
        report = None
        if self._is_first:
            is_full = self._progress.takes_full_save(part)
            if is_full and self._shrink:
                fleet.shrink()
            result = Result(part.name, auc, samples, _num_rows())
            self._progress = self._save(part, result, is_full)
            self._has_saved = True
            _saved_here[current_job.get_job()] = Storage(self._model_dir).path
            seconds = time.monotonic() - start
            report = PassReport(
                part.name, self._progress.passes, auc, samples, rate, self._progress.deltas, result.rows, seconds
            )
            print(report.line(), flush=True)
        return msgspec.convert(gather_at("saved", part.name, msgspec.to_builtins(report))[0], prepared(PassReport))

    def _save(self, part: Part, result: Result, is_full: bool) -> PassProgress:
        """Save the model and the progress in one step; returns the progress."""
        if not is_full:
            progress = self._progress.after(part, result, is_full=False)
            try:
                fleet.save_persistables(self._model_dir, 1, extra_of(progress))
                return progress
            except CheckpointError as error:
                if self._has_saved:
                    raise
                # At the first save of a run, the tables may have other policies than the saved ones.
                print(
                    f"part {part.name}: makes a full save, because a delta is not possible: {error}",
                    file=sys.stderr,
                    flush=True,
                )
        progress = self._progress.after(part, result, is_full=True)
        fleet.save_persistables(self._model_dir, 0, extra_of(progress))
        return progress


def _refuse_restarted_worker() -> None:
    """Refuse a restarted worker: it would train its part twice, since the servers still have the first gradients."""
    if current_job.get_job().info.restart:
        raise FleetError(
            "this worker was started again in the middle of a job, whose servers hold half of a part. Start the whole "
            "job again: it goes on from the last complete pass. For fleetrun to do so use --max_job_restart, not "
            "--max_restart."
        )


def _num_samples() -> int:
    return int(fleet.stats()["worker"]["samples"])


def _num_rows() -> int:
    """Rows of all sparse tables."""
    tables = [table for server in fleet.stats()["servers"] for table in server["tables"].values()]
    return sum(table["rows"] for table in tables if not table["is_dense"])
