"""Folders of one user. Their contents are executed or grant access, so no other user may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torchfleet.base.errors import SecurityError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_own(folder: Path) -> None:
    """Create the folder with mode 0700 if it does not exist. Raises SecurityError if it fails `check_own`, and OSError
    if it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(folder)


def check_own(folder: Path) -> None:
    """Raise SecurityError unless this is a folder, not a link, that only this user and root can write to. Raises
    OSError if it cannot be inspected.
    """
    found = folder.lstat()  # not stat(): the target of a link may change later
    if not stat.S_ISDIR(found.st_mode):
        raise SecurityError(f"expected a folder at {folder}, found a link or a file: remove it")
    if found.st_uid not in (os.geteuid(), 0):
        raise SecurityError(
            f"{folder} belongs to user {found.st_uid}, and this is user {os.geteuid()}: what another user wrote is not "
            "used. Remove it, or choose another folder."
        )
    if found.st_mode & _OTHERS_WRITE:
        raise SecurityError(
            f"{folder} can be written to by others (mode {stat.S_IMODE(found.st_mode):o}): what they wrote is not "
            f"used. Say `chmod go-w {folder}` if all in it is yours, or choose another folder."
        )
