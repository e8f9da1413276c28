"""Totals of a job from the reports of its processes, for a summary of a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torchfleet.base.monitor.freshness import Ages, in_short, summed
from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.base.printable import bare
from torchfleet.observe.watch import figures


@dataclass(frozen=True)
class Progress:
    """The progress of the worker that is furthest behind."""

    epoch: int  # from 0
    epochs: int | None  # the total number, if the script reports it
    share: float | None  # of this epoch; None: its size is not known
    done: int
    unit: str
    eta_s: float | None  # the largest of all workers

    @property
    def heading(self) -> str:
        return f"epoch {self.epoch + 1}{f'/{self.epochs}' if self.epochs else ''}"

    @property
    def text(self) -> str:
        """epoch 1/3 37 %, ETA 1:20."""
        if self.share is None:
            return f"{self.heading}: {figures.count(self.done)} {self.unit}"
        eta = f", ETA {figures.duration(self.eta_s)}" if self.eta_s and self.share < 1 else ""
        return f"{self.heading} {figures.share(self.share)}{eta}"


@dataclass(frozen=True)
class JobTotals:
    """Sums and means over all processes. A value that no process reports is None or empty."""

    mode: str = ""
    samples: int = 0
    rate: float = 0.0  # samples/s of the last seconds
    training_s: float | None = None  # seconds that the samples took, from the first step to the last
    is_training: bool = False  # whether any worker is making steps
    metrics: dict[str, float] = field(default_factory=dict)  # means over the workers that report them
    progress: Progress | None = None
    rows: int | None = None
    num_tables: int = 0  # with rows
    table_bytes: int = 0
    server_memory: int = 0
    have_compiled: bool = False  # a server has compiled kernels: its memory has the compiler
    busy: float | None = None
    waiting: float | None = None
    dense_ages: Ages = field(default_factory=dict)
    sparse_ages: Ages = field(default_factory=dict)

    @property
    def mean_rate(self) -> float:
        """Samples per second since the first step."""
        return self.samples / self.training_s if self.training_s else 0.0

    @property
    def memory_text(self) -> str:
        """322 MB, or 961 MB with the compiler."""
        return f"{figures.size(self.server_memory)}{' with the compiler' if self.have_compiled else ''}"

    @property
    def staleness(self) -> str:
        return in_short(self.dense_ages, self.sparse_ages)

    @property
    def shown_metrics(self) -> list[str]:
        """loss 0.4312; the loss first."""
        names = sorted(self.metrics, key=lambda name: name != "loss")
        return [f"{bare(name)} {figures.metric(self.metrics[name])}" for name in names]


def totals_of(snapshot: JobSnapshot) -> JobTotals:
    """Compute the totals. A backup holds the same rows as its primary, so only its memory counts."""
    servers = [role.status for role in snapshot.of("server")]
    primaries = [status for status in servers if not status.get("backup")]
    workers = snapshot.training
    training = [role.status for role in workers if is_training(role)]
    tables = [table for status in primaries for table in status.get("tables", {}).values()]
    rows = [status["rows"] for status in primaries if "rows" in status]
    return JobTotals(
        mode=next((role.status["mode"] for role in workers if "mode" in role.status), ""),
        samples=sum(role.status.get("samples", 0) for role in workers),
        rate=sum(status.get("samples_per_s", 0.0) for status in training),
        training_s=_training_seconds([role.status for role in workers]),
        is_training=bool(training),
        metrics=means(role.metrics for role in workers),
        progress=_progress([role.status for role in workers]),
        rows=sum(sum(found.values()) for found in rows) if any(rows) else None,
        num_tables=len({name for found in rows for name in found}),
        table_bytes=sum(table["bytes"] for table in tables),
        server_memory=sum(status.get("memory", 0) for status in servers),
        have_compiled=any(status.get("compiled") for status in servers),
        busy=_mean(status.get("busy") for role in snapshot.of("server") if _runs(role) for status in [role.status]),
        waiting=_mean(status.get("waiting") for status in training),
        dense_ages=summed(status.get("staleness_dense", {}) for status in primaries),
        sparse_ages=summed(status.get("staleness_sparse", {}) for status in primaries),
    )


def is_training(role: RoleSnapshot) -> bool:
    """Whether a worker runs and has not left the job."""
    return _runs(role) and not role.status.get("left")


def _runs(role: RoleSnapshot) -> bool:
    return role.state == "running" and not role.status.get("backup")


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def means(metrics: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every metric over the workers that report it."""
    found: dict[str, list[float]] = {}
    for reported in metrics:
        for name, value in reported.items():
            found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def _training_seconds(statuses: Sequence[dict[str, Any]]) -> float | None:
    """Return the seconds that training took: of the worker that took the longest, all its samples at its mean rate.

    A worker measures the mean from the end of its first step on. This counts the first step as long as the others.
    """
    paces = [(status.get("samples", 0), status.get("samples_per_s_mean")) for status in statuses]
    return max((samples / mean for samples, mean in paces if mean), default=None)


def _progress(statuses: Sequence[dict[str, Any]]) -> Progress | None:
    """Return the progress of the worker that is furthest behind, among those that have not left if there are any."""
    told = [status["progress"] for status in statuses if "progress" in status]
    open_ = [status["progress"] for status in statuses if "progress" in status and not status.get("left")]
    if not told:
        return None
    last = min(open_ or told, key=lambda progress: (progress["epoch"], _share(progress) or 0.0, progress["done"]))
    counted = [found for found in open_ if found["epoch"] == last["epoch"] or "epochs" in found]
    etas = [found["eta_s"] for found in counted if "eta_s" in found]
    return Progress(
        last["epoch"], last.get("epochs"), _share(last), last["done"], last["unit"], max(etas, default=None)
    )


def _share(progress: dict[str, Any]) -> float | None:
    """Return how much of its epoch a worker has done; None if its size is not known."""
    total = progress.get("total")
    return min(1.0, progress["done"] / total) if total else None
