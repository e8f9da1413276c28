"""The status that a worker reports to its launcher. docs/watching.md lists the fields."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from torchfleet.base.backward_loss import LossWatch
from torchfleet.base.errors import BarrierError, WorkerMissing
from torchfleet.base.fetch import numbers
from torchfleet.base.monitor.epochs import Epoch, Epochs, length
from torchfleet.base.monitor.prometheus.metrics_port import open_metrics_port
from torchfleet.base.monitor.status import StatusFile
from torchfleet.base.monitor.training_pace import TrainingPace
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.modes.communicator import Communicator

Item = TypeVar("Item")
_PERIOD = 1.0  # seconds over which a share of waiting is measured


class Counted(Protocol):
    """Data whose size may be known."""

    @property
    def num_samples(self) -> int | None: ...


class WorkerStatus:
    """Collects the status of a worker's training and writes it to its status file."""

    def __init__(self, info: RoleInfo, mode: str, communicator: Callable[[], Communicator], engine: Engine) -> None:
        self._mode, self._communicator, self._engine = mode, communicator, engine
        self._file = StatusFile(info.status_file, self._make, open_metrics_port("worker", info.worker_index))
        self._pace = TrainingPace()
        self.epochs = Epochs(lambda: communicator().num_steps)
        self.waiting_share = WaitingShare(lambda: sum(self._waits(communicator().stats()).values()))
        self._metrics: dict[str, float] = {}
        self._losses = LossWatch() if self._file.is_read else None
        self._loss: dict[str, torch.Tensor] = {}  # of the last step; a number only when it is written
        self.has_left = False
        self._waited_in_vain = False
        self._hook = sys.excepthook
        sys.excepthook = self._tell_of_error

    def write(self, now: bool = False) -> None:
        """Write the status if it is due, or at once with `now`."""
        self._file.write(now)

    def step_made(self) -> None:
        if self._losses is not None and (loss := self._losses.take()) is not None:
            self._loss = {"loss": loss}
        self._file.step_made()

    def close(self) -> None:
        if sys.excepthook == self._tell_of_error:
            sys.excepthook = self._hook
        if self._losses is not None:
            self._losses.close()
        self._file.close()

    def report(self, metrics: dict[str, float]) -> None:
        """Record the numbers that the script reports."""
        self._metrics.update(metrics)
        self._file.write()

    def follow(self, loader: Iterable[Item], batches: Iterable[Item]) -> Iterator[Item]:
        """Iterate over a loader's batches and count them."""
        with self.epochs.begin(partial(length, loader), "batches") as epoch:
            for batch in batches:
                yield batch
                epoch.done += 1

    @contextmanager
    def follow_samples(self, dataset: Counted) -> Iterator[Epoch]:
        """A pass over a dataset. The caller counts its samples and values."""
        with self.epochs.begin(lambda: dataset.num_samples, "samples") as epoch:
            yield epoch
            self._metrics.update(numbers(epoch.values))

    def _tell_of_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Called when the script ends with an error. If it waited in vain for another worker, tell the launcher."""
        if isinstance(error, (WorkerMissing, BarrierError)):
            self._waited_in_vain = True
            self._file.write(now=True)
        self._hook(kind, error, trace)

    def _waits(self, stats: Mapping[str, Any]) -> dict[str, float]:
        return {name: stats["steps"] * stats[f"{name}_wait_ms"] / 1000 for name in ("pull", "push")}

    def _make(self) -> dict[str, Any]:
        stats = self._communicator().stats()
        waits = self._waits(stats)
        if (epoch := self.epochs.current) is not None:
            self._metrics.update(numbers(epoch.values))
        more: dict[str, Any] = {"waiting": self.waiting_share(), "progress": self.epochs.status() or None}
        more["waited_in_vain"] = self._waited_in_vain or None
        if "queue_size" in stats:
            more |= {"queue": stats["queue"], "queue_size": stats["queue_size"]}
        return {
            "role": "worker",
            "mode": self._mode,
            **self._pace.status(stats["steps"], self._engine.num_samples, self._file.last_step, waits),
            **{f"{name}_waited_s": seconds for name, seconds in waits.items()},
            **{name: value for name, value in more.items() if value is not None},
            "left": self.has_left,
            "retries": stats["retries"],
            "metrics": {**numbers(self._loss), **self._metrics},
        }


class WaitingShare:
    """The share of the last period that a worker waited for servers, from a counter of seconds. Thread-safe."""

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._share: float | None = None
        self._at, self._before = time.monotonic(), 0.0

    def __call__(self) -> float | None:
        """None before the end of the first period. Training threads of one worker count together, at most as 1."""
        now = time.monotonic()
        if now - self._at >= _PERIOD:
            waited = self._waited()
            self._share = min(1.0, (waited - self._before) / (now - self._at))
            self._at, self._before = now, waited
        return self._share
