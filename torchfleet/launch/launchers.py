"""The launchers of fleetrun. A new launcher is a class with the methods of Launcher and an entry in LAUNCHERS."""

from __future__ import annotations

import argparse
from typing import Protocol

from torchfleet.launch.clusters.ray_launcher import RayLauncher
from torchfleet.launch.clusters.slurm_launcher import SlurmLauncher
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.ranks.rank_launcher import RankLauncher
from torchfleet.launch.server_launcher import ServerLauncher
from torchfleet.launch.simulation_launcher import SimulationLauncher


class Launcher(Protocol):
    """Starts the processes of a job, watches them and ends them together.

    fleetrun imports every launcher when it starts. Import slow modules, such as torch, in `run`.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that only this launcher has."""

    def takes(self, options: argparse.Namespace) -> bool:
        """Whether this launcher starts the job. Raises RoleError if its options contradict other options."""

    def describe(self, job: JobSpec, options: argparse.Namespace) -> list[str]:
        """Return the lines of `--dry_run`: every process with its command and environment. Starts nothing.

        Raises RoleError for invalid options.
        """

    def run(self, job: JobSpec, options: argparse.Namespace) -> int:
        """Run the job to its end and return its exit status: 0 if it finished, 1 if it failed, 128 + N for signal N.

        No process of the job is left when this returns. Raises RoleError for invalid options before anything is
        started.
        """


# Tried from last to first. The first entry takes every job that no other launcher takes.
LAUNCHERS: dict[str, Launcher] = {
    "servers": ServerLauncher(),
    "ranks": RankLauncher(),
    "simulation": SimulationLauncher(),
    "ray": RayLauncher(),
    "slurm": SlurmLauncher(),
}


def launcher_of(options: argparse.Namespace) -> Launcher:
    """Return the launcher for the job of this command line."""
    return next(launcher for launcher in reversed(LAUNCHERS.values()) if launcher.takes(options))
