"""Watches a job under Slurm from its first task, by the status files that all tasks write to the shared folder."""

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
    """Yield a function that records and shows all roles, and one to call when the role of this task has finished.

    The first task is a server and ends after the workers. It records the roles, and shows them if it has a terminal
    (srun --pty). In the other tasks both functions do nothing.
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
    """The role of one task of the step, known from its status file."""

    def __init__(self, role: str, index: int, folder: Path) -> None:
        self.task = Task(role, index)
        self.log, self.status_file = folder / self.task.log_name, folder / f".status.{role}.{index}"
        self._was_there, self._last = False, dict[str, Any]()

    @property
    def returncode(self) -> int | None:
        """0 once the task has removed its status file at its end. The task itself reports how it ended."""
        is_there = self.status_file.exists()
        self._was_there |= is_there
        return 0 if self._was_there and not is_there else None

    def status(self) -> dict[str, Any]:
        """The last status of the role, also after its end."""
        self._last = super().status() or self._last
        return self._last
