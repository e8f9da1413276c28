"""What workers have done so far, in files that are mapped into memory: they outlive a killed worker."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

_BEGUN, _ACKNOWLEDGED, _IS_DONE, _HEAD = range(4)
_RING = 1 << 16  # ends of steps that are kept
_CONTROL = "control"
Moments = npt.NDArray[np.float64]


class Progress:
    """Of one process of a worker: how many steps it has begun, and how many were acknowledged by the servers."""

    def __init__(self, path: Path, first: int | None = None) -> None:
        """`first`: of the worker itself, the number of steps that those before it had begun."""
        self.worker, self.restart = (int(part) for part in path.name.split("-")[1:])
        is_new = first is not None
        if is_new and not path.exists():
            path.with_suffix(".new").write_bytes(bytes(8 * (_HEAD + _RING)))
            os.replace(path.with_suffix(".new"), path)  # a reader sees all of it or none
        self._numbers = np.memmap(path, np.float64, "r+" if is_new else "r", shape=(_HEAD + _RING,))
        if first is not None:
            self._numbers[[_BEGUN, _ACKNOWLEDGED]] = first

    def begin(self, step: int) -> None:
        self._numbers[_BEGUN] = step + 1

    def end(self, step: int) -> None:
        """CLOCK_MONOTONIC is one clock for all processes of the machine."""
        self._numbers[_HEAD + step % _RING] = time.monotonic()

    def acknowledge(self) -> None:
        """All that was begun is with the servers."""
        self._numbers[_ACKNOWLEDGED] = self._numbers[_BEGUN]

    def finish(self) -> None:
        self.acknowledge()
        self._numbers[_IS_DONE] = 1

    @property
    def begun(self) -> int:
        return int(self._numbers[_BEGUN])

    @property
    def acknowledged(self) -> int:
        return int(self._numbers[_ACKNOWLEDGED])

    @property
    def is_done(self) -> bool:
        return bool(self._numbers[_IS_DONE])

    def ends_since(self, moment: float) -> Moments:
        """When steps ended after this moment, in order."""
        ends = np.sort(self._numbers[_HEAD:])
        return np.asarray(ends[np.searchsorted(ends, moment, side="right") :])


class Board:
    """The folder with the progress of all workers, and the step after which they are to end."""

    def __init__(self, folder: Path, end: int | None = None) -> None:
        """`end`: given by the process that makes the folder; 0: not known yet."""
        self.folder = folder
        path = folder / _CONTROL
        if end is not None:
            path.write_bytes(np.array([end], np.float64).tobytes())
        self._control = np.memmap(path, np.float64, "r+", shape=(1,))
        self._known: dict[Path, Progress] = {}

    @property
    def end(self) -> int:
        return int(self._control[0])

    @end.setter
    def end(self, step: int) -> None:
        self._control[0] = step

    def begin(self, worker: int, restart: int) -> Progress:
        """Of a worker that starts."""
        before = max((progress.begun for progress in self.of(worker)), default=0)
        return Progress(self.folder / f"worker-{worker}-{restart}", before)

    def all(self) -> list[Progress]:
        for path in sorted(self.folder.glob("worker-*")):
            if path not in self._known and path.suffix != ".new":
                self._known[path] = Progress(path)
        return list(self._known.values())

    def of(self, worker: int) -> list[Progress]:
        return [progress for progress in self.all() if progress.worker == worker]

    def num_steps(self) -> list[int]:
        """Begun by each worker, those of its earlier processes included."""
        found: dict[int, int] = {}
        for progress in self.all():
            found[progress.worker] = max(progress.begun, found.get(progress.worker, 0))
        return [found[worker] for worker in sorted(found)]

    def ends_since(self, moment: float) -> list[Moments]:
        """Of each worker."""
        found: dict[int, list[Moments]] = {}
        for progress in self.all():
            found.setdefault(progress.worker, []).append(progress.ends_since(moment))
        return [np.sort(np.concatenate(found[worker])) for worker in sorted(found)]

    def silence(self, since: float) -> float:
        """The longest time that a worker spent between two steps from this moment on."""
        return max(_longest(since, ends) for ends in self.ends_since(since))


def _longest(since: float, ends: Moments) -> float:
    moments = [since, *ends] if len(ends) else [since, time.monotonic()]
    return float(np.diff(moments).max())
