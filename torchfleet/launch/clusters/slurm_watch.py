"""A job under Slurm as its first task sees it: by the status files of all tasks, in the folder that all of them see."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchfleet.launch.clusters.slurm_step import SlurmStep
from torchfleet.launch.job_spec import JobSpec, Task
from torchfleet.launch.job_watch import JobWatch
from torchfleet.launch.processes import Process


@contextlib.contextmanager
def watched(
    job: JobSpec, step: SlurmStep, folder: Path, num_servers: int, num_workers: int
) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """What looks at all roles, and what is to be called when the role of this task has finished.

    The first task, a server, which ends behind the workers, records the roles, and shows them if it has a terminal
    (srun --pty). In the other tasks both do nothing.
    """
    if step.rank:
        yield (lambda: None), (lambda: None)
        return
    counts = (("server", num_servers), ("worker", num_workers))
    roles = [_Role(role, index, folder) for role, num in counts for index in range(num)]
    watch = JobWatch(job, folder, shows=sys.stdout.isatty())
    try:
        yield (lambda: watch.show(roles)), (lambda: watch.show_end(roles))
    finally:
        watch.close()


class _Role(Process):
    """A role of any task."""

    def __init__(self, role: str, index: int, folder: Path) -> None:
        self.task = Task(role, index)
        self.log, self.status_file = folder / self.task.log_name, folder / f".status.{role}.{index}"
        self._was_there, self._last = False, dict[str, Any]()

    @property
    def returncode(self) -> int | None:
        """A task that has ended removes its status; how it ended, its own task says."""
        is_there = self.status_file.exists()
        self._was_there |= is_there
        return 0 if self._was_there and not is_there else None

    def status(self) -> dict[str, Any]:
        """What it said last, also when it has ended."""
        self._last = super().status() or self._last
        return self._last
