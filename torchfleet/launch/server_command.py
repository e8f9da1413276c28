"""The command of the servers of a job: the script, or a server that does not need the script."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence

from torchfleet.base.role.process_settings import RUN_SCRIPT
from torchfleet.base.role.variables import is_on
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.processes import module_command
from torchfleet.launch.server_branch import read_branch

_MODULE = "torchfleet.server"


def add_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--servers_run_script",
        action="store_true",
        help="run the script on servers, too (default: only if it does more there than init_server and run_server)",
    )


def with_server_command(job: JobSpec, options: argparse.Namespace) -> tuple[JobSpec, list[str]]:
    """Return the job with the command of its servers, and a line with the reason if servers run the script because of
    what it does on them."""
    if options.servers_run_script:
        return job, []
    command, told = server_command(options.script, options.arguments, options.module)
    return dataclasses.replace(job, server_command=tuple(command or ())), told


def server_command(
    script: str, arguments: Sequence[str], is_module: bool, environment: Mapping[str, str] = os.environ
) -> tuple[list[str] | None, list[str]]:
    """Return the command of a server that does not need the script, or None and a line with the reason, if known.
    Raises RoleError if FLEET_SERVERS_RUN_SCRIPT is not a switch."""
    if is_on(environment, RUN_SCRIPT):
        return None, []
    branch = read_branch(script, arguments, is_module)
    if branch.options is not None:
        return module_command(_MODULE, branch.options), []
    return None, [f"servers run the script: {branch.reason}"] if branch.reason else []
