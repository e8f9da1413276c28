"""Where fleetrun's servers keep acknowledged changes: in memory only, or also in a log on disk."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchfleet.base.errors import RoleError, SecurityError
from torchfleet.base.ownership import make_own
from torchfleet.base.role.process_settings import (
    DURABILITY,
    FSYNC,
    LOG_RUN,
    LOG_STORE,
    MAX_FSYNC_MS,
    durability_of,
    log_folder,
)
from torchfleet.base.role.role_info import SETTINGS
from torchfleet.launch.surroundings import surroundings
from torchfleet.ps.server.log.log_start import START

_FOLDER = "server_state"  # the folder of the servers' logs, in the folder of a run


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--durability",
        choices=SETTINGS,
        help="log: servers write every change to disk before they answer, and one that is killed is started again with "
        "all of it, as often as --max_restart says (default: FLEET_DURABILITY, else none)",
    )
    group.add_argument(
        "--log_store",
        metavar="DIR",
        help="folder of the servers' logs; the same one again goes on from it (default: FLEET_LOG_STORE, else one of "
        "this run, which is removed at its end)",
    )
    group.add_argument(
        "--fsync_ms",
        type=float,
        metavar="MS",
        help="a power loss may lose the changes of this many milliseconds; 0: none, every answer waits for the disk "
        "(default: FLEET_FSYNC_MS, else 10)",
    )


def durability_variables(options: argparse.Namespace, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that tell servers and workers the durability. Raises RoleError for invalid options.
    `environment`: default: that which the job has from this process."""
    environment = surroundings() if environment is None else environment
    given = {DURABILITY: options.durability, LOG_STORE: options.log_store, FSYNC: options.fsync_ms}
    found = {name: str(value) for name, value in given.items() if value is not None}
    if options.fsync_ms is not None and not 0 <= options.fsync_ms <= MAX_FSYNC_MS:
        raise RoleError(
            f"--fsync_ms must be a number of milliseconds from 0, with which every answer waits for the disk, to "
            f"{MAX_FSYNC_MS:g}; found {options.fsync_ms:g}"
        )
    settings = durability_of({**environment, **found})
    if settings["durability"] == "none":
        for name, option in ((LOG_STORE, "--log_store"), (FSYNC, "--fsync_ms")):
            if name in found:
                raise RoleError(f"{option} is about the log of servers, and there is none: add --durability log")
        return found
    found[DURABILITY] = settings["durability"]
    if settings["log_store"]:
        found[LOG_STORE] = str(Path(settings["log_store"]).absolute())
    return found


def make_store(variables: Mapping[str, str], servers: Sequence[int], backups: Sequence[int] = ()) -> None:
    """Create the folder for the logs of `servers` and `backups`, if one is given. Raises RoleError if servers could not
    write there, if other users can (what they write would become the model), and if some servers have a log and others
    have no folder: servers without a folder would begin without their rows."""
    if LOG_STORE not in variables:
        return
    folder = Path(variables[LOG_STORE])
    try:
        make_own(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, SecurityError) as error:
        raise RoleError(
            f"--log_store {folder}: servers cannot keep their logs there: {error}. Give a folder that can be made and "
            "written, or leave --log_store (FLEET_LOG_STORE) out."
        ) from None
    folders = [log_folder(str(folder), server) for server in servers]
    others = [log_folder(str(folder), server, 1) for server in backups]
    kept, missing = (
        [each for each in [*folders, *others] if (each / START).exists()],
        [each for each in folders if not each.exists()],
    )
    if kept and missing:
        raise RoleError(
            f"--log_store {folder}: expected the logs of all servers or of none; {kept[0]} has a log, and "
            f"{missing[0]} does not exist: that server would begin without its rows. Put the folder back, or give "
            "another --log_store and go on from the last checkpoint."
        )
    if backups and not kept:  # so that a replica can tell whether the folder of the other replica is lost
        for each in [*folders, *others]:
            make_own(each)


def require_store(variables: Mapping[str, str], why: str) -> None:
    """Raise RoleError, with `why` in its message, if servers keep logs and no folder of them was given. `variables`:
    from durability_variables."""
    if variables.get(DURABILITY) == "log" and LOG_STORE not in variables:
        raise RoleError(f"--durability log needs --log_store DIR here: {why}")


def described_store(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what `log_store` yields, for --dry_run."""
    if variables.get(DURABILITY, "none") == "none":
        return dict(variables)
    return {LOG_STORE: "(a folder of this run)", **variables, LOG_RUN: "(the name of this run)"}


@contextlib.contextmanager
def log_store(variables: Mapping[str, str], run_dir: Path) -> Iterator[dict[str, str]]:
    """Yield the variables with a folder for the servers' logs: the given one, or a new one that is removed at the
    end."""
    if durability_of({**surroundings(), **variables})["durability"] == "none":
        yield dict(variables)
        return
    run = {**variables, LOG_RUN: run_dir.name}
    if LOG_STORE in variables:
        yield run
        return
    folder = run_dir / _FOLDER
    try:
        yield {**run, LOG_STORE: str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
