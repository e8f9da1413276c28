"""Temporary folders of this user. A folder that a killed process has left is removed when the next one is made.

torchfleet-UID/          in the folder of temporary files; mode 0700, checked before use
    KIND-XXXXXXXX/       locked as long as the process that made it lives; then removed when the next one is made
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchfleet.base.ownership import make_own


class OwnFolder:
    """A folder that only this user can enter, until `close`."""

    def __init__(self, kind: str) -> None:
        """Removes the folders that killed processes of this user have left. Raises OSError or SecurityError if the
        folder cannot be made, or if others can write where it would be."""
        with _locked_parent() as parent:
            _sweep(parent)
            self.path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=parent))
            self._lock = _locked(self.path)  # shows that the process lives, also to programs that clean /tmp

    def close(self) -> None:
        """Remove the folder with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def own_folder(kind: str) -> Iterator[Path]:
    """Yield a folder that only this user can enter. It is removed at the end, or later if this process is killed."""
    folder = OwnFolder(kind)
    try:
        yield folder.path
    finally:
        folder.close()


def user_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"torchfleet-{os.getuid()}"


def is_alive(folder: Path) -> bool:
    """Whether the process that made this folder of the user's folder lives."""
    with contextlib.suppress(OSError):
        lock = _locked(folder)
        if lock is not None:
            os.close(lock)
            return False
    return True


@contextlib.contextmanager
def _locked_parent() -> Iterator[Path]:
    """This user's folder, locked, so that no other process removes a new folder in it before that is locked. Blocks
    until the lock is free."""
    parent = user_folder()
    make_own(parent)
    lock = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield parent
    finally:
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that were killed. Only this user can put links there."""
    for folder in parent.glob("*-*"):
        if not is_alive(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int | None:
    """A file descriptor that locks the folder until it is closed; None if another process holds the lock."""
    made = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(made)
        return None
    return made
