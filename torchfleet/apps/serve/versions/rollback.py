"""Requests of a user to the writer: go back to an older version of a served model, or on to the newest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchfleet.apps.serve.versions.follow_process import has_writer, read_settings
from torchfleet.apps.serve.versions.version_description import CURRENT, Description, read_current
from torchfleet.apps.serve.versions.version_store import (
    Wanted,
    read_status,
    read_versions,
    read_wanted,
    write_wanted,
)
from torchfleet.base.errors import CheckpointError
from torchfleet.base.own_folders import user_folder
from torchfleet.base.storage import Storage

WAIT = 30.0  # seconds for the writer to obey


class ListedVersion(NamedTuple):
    """A version that one can go back to."""

    number: int
    created: float
    source: str
    is_current: bool


def served_folder(model: str) -> Path:
    """The folder of versions of a model that is served on this machine. `model`: the model's folder or URL, or the
    folder of versions itself. Raises CheckpointError if it is not served here, or served more than once.
    """
    if (Path(model) / CURRENT).exists():
        return Path(model)
    path = Storage(model).path
    found = []
    for folder in sorted(user_folder().glob("serve-*")):
        try:
            if Storage(read_settings(folder).model).path == path and has_writer(folder):
                found.append(folder)
        except (OSError, msgspec.MsgspecError):
            continue  # of a process that is starting or ending
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise CheckpointError(
            f"expected one process that serves {model} here with --follow, found {names}. Of several, give "
            f"the folder of its versions. They are below {user_folder()}, or where TMPDIR of that process leads."
        )
    return found[0]


def versions(folder: Path) -> list[ListedVersion]:
    """The versions that one can go back to, oldest first."""
    current = read_current(folder)
    return [
        ListedVersion(known.number, known.created, known.source, current is not None and known.number == current.number)
        for known in read_versions(folder)
    ]


def ask(folder: Path, number: int, wait: float = WAIT) -> Description:
    """Go back to version `number`, and stay there; 0: serve the newest again. Returns the version that is then current.

    Raises CheckpointError if there is no such version, if the writer drops the request because the version was removed
    meanwhile, or if no writer obeys within `wait` seconds.
    """
    known = [version.number for version in versions(folder)]
    if number and number not in known:
        raise CheckpointError(f"version {number} is not kept any more, or never was; expected one of {known}")
    if not has_writer(folder):
        raise CheckpointError(f"no process writes versions to {folder}: is the model served with --follow?")
    write_wanted(folder, Wanted(number))
    end = time.monotonic() + wait
    while time.monotonic() < end:
        current = read_current(folder)
        if (
            current is not None
            and read_status(folder).pinned == number
            and (number in (current.restored, current.number) or not number)
        ):
            return current
        if read_wanted(folder).pin != number:
            raise CheckpointError(
                f"version {number} is not kept any more, or another request has replaced this one; expected one of "
                f"{[version.number for version in versions(folder)]}"
            )
        time.sleep(0.02)
    raise CheckpointError(f"the process that writes versions to {folder} did not obey within {wait:g} s")
