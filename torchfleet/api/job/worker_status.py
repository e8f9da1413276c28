"""What a worker tells its launcher: docs/watching.md has the fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from torchfleet.base.fetch import numbers
from torchfleet.base.monitor.epochs import Epoch, Epochs, length
from torchfleet.base.monitor.prometheus.metrics_port import open_metrics_port
from torchfleet.base.monitor.status import StatusFile
from torchfleet.base.monitor.training_pace import TrainingPace
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.modes.communicator import Communicator

Item = TypeVar("Item")
_PERIOD = 1.0  # seconds that a share of waiting is taken over


class Counted(Protocol):
    """Data of which it may be known how much there is."""

    @property
    def num_samples(self) -> int | None: ...


class WorkerStatus:
    """Gathers what is known of a worker's training, and writes it to its status file."""

    def __init__(self, info: RoleInfo, mode: str, communicator: Callable[[], Communicator], engine: Engine) -> None:
        self._mode, self._communicator, self._engine = mode, communicator, engine
        self._file = StatusFile(info.status_file, self._make, open_metrics_port("worker", info.worker_index))
        self._pace = TrainingPace()
        self.epochs = Epochs(lambda: communicator().num_steps)
        self.waiting_share = WaitingShare(lambda: sum(self._waits(communicator().stats()).values()))
        self._metrics: dict[str, float] = {}
        self.has_left = False

    def write(self, now: bool = False) -> None:
        """If it is time for it, or at once."""
        self._file.write(now)

    def step_made(self) -> None:
        self._file.step_made()

    def close(self) -> None:
        self._file.close()

    def report(self, metrics: dict[str, float]) -> None:
        """What the script says of its training."""
        self._metrics.update(metrics)
        self._file.write()

    def follow(self, loader: Iterable[Item], batches: Iterable[Item]) -> Iterator[Item]:
        """The batches of a loader, counted as they are used."""
        with self.epochs.begin(partial(length, loader), "batches") as epoch:
            for batch in batches:
                yield batch
                epoch.done += 1

    @contextmanager
    def follow_samples(self, dataset: Counted) -> Iterator[Epoch]:
        """A pass over a dataset, whose samples and values somebody else counts."""
        with self.epochs.begin(lambda: dataset.num_samples, "samples") as epoch:
            yield epoch
            self._metrics.update(numbers(epoch.values))

    def _waits(self, stats: Mapping[str, Any]) -> dict[str, float]:
        return {name: stats["steps"] * stats[f"{name}_wait_ms"] / 1000 for name in ("pull", "push")}

    def _make(self) -> dict[str, Any]:
        stats = self._communicator().stats()
        waits = self._waits(stats)
        if (epoch := self.epochs.current) is not None:
            self._metrics.update(numbers(epoch.values))
        more: dict[str, Any] = {"waiting": self.waiting_share(), "progress": self.epochs.status() or None}
        if "queue_size" in stats:
            more |= {"queue": stats["queue"], "queue_size": stats["queue_size"]}
        return {
            "role": "worker",
            "mode": self._mode,
            **self._pace.status(stats["steps"], self._engine.num_samples, waits),
            **{f"{name}_waited_s": seconds for name, seconds in waits.items()},
            **{name: value for name, value in more.items() if value is not None},
            "left": self.has_left,
            "retries": stats["retries"],
            "metrics": dict(self._metrics),
        }


class WaitingShare:
    """For what share of the last period a worker waited for servers, from a count of seconds. Any thread may ask."""

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._share: float | None = None
        self._at, self._before = time.monotonic(), 0.0

    def __call__(self) -> float | None:
        """None before the first period is over. Training threads of one worker count together, as one at most."""
        now = time.monotonic()
        if now - self._at >= _PERIOD:
            waited = self._waited()
            self._share = min(1.0, (waited - self._before) / (now - self._at))
            self._at, self._before = now, waited
        return self._share
