"""The interface of a callback, and the callbacks of a process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.notices import tell

METHODS = ("on_start", "on_report", "on_epoch_end", "on_save", "on_end")


class Callback:
    """Base class of callbacks. Its methods do nothing; override those that you need. Subclassing is optional.

    The training thread calls all methods and waits for them. With train_from_dataset(thread=n), any of its threads may
    call on_report.
    """

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Called before training begins. `info` has mode, worker_index, num_workers, num_servers (in a job with
        servers), version and `strategy`, the settings that differ from their defaults. An error here is raised, since
        it is a mistake in the setup.
        """

    def on_report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the numbers of fleet.report, or of train_from_dataset every print_period. `step`: this worker's
        step.
        """

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Called after a pass of train_from_dataset; passes are counted from 0. `metrics` has the last step's numbers
        and `samples_per_s`.
        """

    def on_save(self, dirname: str) -> None:
        """Called after a save to `dirname`; with fleet.save(asynchronous=True), while it is being written."""

    def on_end(self, stats: Mapping[str, Any]) -> None:
        """Called at the end of fleet.stop_worker(). `stats`: the last fleet.stats(); empty if the job was abandoned."""


class Callbacks:
    """All callbacks of this process. Errors in callbacks are printed and training continues, except for `on_start`."""

    def __init__(self) -> None:
        self._waiting: list[object] = []  # for training to begin
        self._begun: list[object] = []
        self._info: Mapping[str, Any] | None = None
        self._num_epochs = 0

    def add(self, callback: object) -> None:
        """Add a callback. It starts when training begins, or at once if training has begun."""
        if isinstance(callback, type) or not any(callable(getattr(callback, name, None)) for name in METHODS):
            raise FleetError(
                f"fleet.add_callback: expected an object with some of the methods {', '.join(METHODS)}, such as one of "
                f"a class of fleet.callbacks.Callback; found {callback!r:.200}"
            )
        self._waiting.append(callback)
        if self._info is not None:
            self.start(self._info)

    def start(self, info: Mapping[str, Any]) -> None:
        self._info = info
        while self._waiting:
            callback = self._waiting.pop(0)
            if callable(method := getattr(callback, "on_start", None)):
                method(info)
            self._begun.append(callback)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_report", step, metrics)

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        self._num_epochs += 1
        self._call("on_epoch_end", self._num_epochs - 1, metrics)

    def save(self, dirname: str) -> None:
        self._call("on_save", dirname)

    def end(self, stats: Mapping[str, Any]) -> None:
        """Call on_end of all callbacks and remove them."""
        self._call("on_end", stats)
        self._waiting.clear()
        self._begun.clear()
        self._info, self._num_epochs = None, 0

    def _call(self, name: str, *arguments: object) -> None:
        for callback in self._begun:
            method: Callable[..., None] | None = getattr(callback, name, None)
            if method is None:
                continue
            try:
                method(*arguments)
            except Exception:
                tell(f"{type(callback).__name__}.{name} has failed; training goes on:\n{traceback.format_exc()}")


def flat(info: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in info.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
