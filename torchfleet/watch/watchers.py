"""What watches a job. The launcher looks at its processes once, and hands the same snapshot to all watchers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Protocol

from torchfleet.monitor.snapshot import JobSnapshot


class Watcher(Protocol):
    """One way to show or record a job. All calls come from the launcher's loop, and none may wait for long."""

    def look(self, snapshot: JobSnapshot) -> None:
        """The job as it is now; several times a second."""

    def note(self, line: str, is_event: bool) -> None:
        """A line for the user. `is_event`: the launcher says it; else it is output of a process."""

    def end(self, snapshot: JobSnapshot) -> None:
        """The job has finished, and this is the last of it. Not called for a job that failed or was stopped."""

    def close(self) -> None:
        """Nothing more will come, however the job ended."""


@dataclass(frozen=True)
class Watching:
    """How the user wants to watch the job, from the options of the command line."""

    verbose: bool = False  # show every table of every server


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options about watching, which all launchers share."""
    group = parser.add_argument_group("watching")
    group.add_argument("--verbose", action="store_true", help="show every table of every server")


def watching_of(options: argparse.Namespace) -> Watching:
    """Raises FleetError for what makes no sense."""
    return Watching(verbose=getattr(options, "verbose", False))  # fleetrun slurm leaves it to the tasks
