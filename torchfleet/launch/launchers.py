"""The ways in which fleetrun can start a job. A new one is a class with these four methods and a line in LAUNCHERS."""

from __future__ import annotations

import argparse
from typing import Protocol

from torchfleet.launch.clusters.ray_launcher import RayLauncher
from torchfleet.launch.clusters.slurm_launcher import SlurmLauncher
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.rank_launcher import RankLauncher
from torchfleet.launch.server_launcher import ServerLauncher
from torchfleet.launch.simulation_launcher import SimulationLauncher


class Launcher(Protocol):
    """Starts the processes of a job, watches them and ends them together.

    Every launcher is imported when fleetrun starts. What is slow to import, such as torch, is imported in `run`.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that only this launcher has."""

    def takes(self, options: argparse.Namespace) -> bool:
        """Whether this launcher starts the job. Raises RoleError if its options contradict other options."""

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        """The lines that `--dry_run` prints: every process with its command and environment. Starts nothing.

        Raises RoleError for options that cannot work.
        """

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        """Run the job to its end and return its exit status: 0 if it finished, 1 if it failed, 128 + N for signal N.

        No process of it is left when this returns. Raises RoleError before anything is started, for options that
        cannot work.
        """


# The last entry is asked first whether it takes a job. The first entry takes all that no other does.
LAUNCHERS: dict[str, Launcher] = {
    "servers": ServerLauncher(),
    "ranks": RankLauncher(),
    "simulation": SimulationLauncher(),
    "ray": RayLauncher(),
    "slurm": SlurmLauncher(),
}


def launcher_of(options: argparse.Namespace) -> Launcher:
    """The launcher that takes the job of this command line."""
    return next(launcher for launcher in reversed(LAUNCHERS.values()) if launcher.takes(options))
