"""The process that writes versions, which a reader starts: `python -m …serve.versions.follow_process FOLDER`.

A folder has one such process, which holds writer.lock. It ends when no process reads the folder any more; without
`follow`, as soon as there is a version.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import msgspec

from torchfleet.apps.serve.versions.follower import Follower, FollowSettings
from torchfleet.apps.serve.versions.version_store import write_whole
from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.prepared_types import prepared

SETTINGS = "settings.json"
WRITER, READERS = "writer.lock", "readers.lock"
_TRIES = 25


def write_settings(folder: Path, settings: FollowSettings) -> None:
    """Store what the writer of this folder must follow."""
    write_whole(folder / SETTINGS, msgspec.json.encode(settings))


def read_settings(folder: Path) -> FollowSettings:
    """What the writer of this folder must follow. Raises OSError if it was not stored."""
    return msgspec.json.decode((folder / SETTINGS).read_bytes(), type=prepared(FollowSettings))


def start_writer(folder: Path) -> subprocess.Popen[bytes]:
    """Start a writer. It ends at once if the folder already has a writer."""
    command = [sys.executable, "-m", "torchfleet.apps.serve.versions.follow_process", str(folder)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def locked(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock (LOCK_SH or LOCK_EX) until it is closed; None if another process holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def has_writer(folder: Path) -> bool:
    return is_locked(folder / WRITER)


def run(folder: Path) -> int:
    """Follow until no process reads the folder. Returns the exit status."""
    lock = _own_lock(folder / WRITER)
    if lock is None:
        return 0
    settings = read_settings(folder)
    follower = Follower(folder, settings)
    try:
        if follower.store.current is not None and not settings.follow:
            return 0  # another writer has made the version and ended since a reader looked
        return _follow(folder, settings, follower)
    finally:
        follower.close()
        os.close(lock)


def _follow(folder: Path, settings: FollowSettings, follower: Follower) -> int:
    store, read_at = follower.store, time.monotonic()
    while True:
        began = time.monotonic()
        try:
            follower.step()
        except FleetError as error:
            store.status.trouble = str(error)
            store.write_status()
        except Exception as error:  # a bug must not end the writer: the current version is served meanwhile
            tell(traceback.format_exc())
            store.status.trouble = f"{type(error).__name__}: {error}"
            store.write_status()
        if store.current is None:
            store.status.failed = store.status.trouble
            store.write_status()
        elif not settings.follow:
            return 0
        if is_locked(folder / READERS):
            read_at = time.monotonic()
        if time.monotonic() - read_at > settings.unread or not folder.exists():
            return 0
        time.sleep(max(0.01, follower.pause - (time.monotonic() - began)))


def _own_lock(path: Path) -> int | None:
    """The lock of the writer; None if there is another writer. Tries for a moment, since readers take the lock briefly
    to test it.
    """
    for _ in range(_TRIES):
        found = locked(path, fcntl.LOCK_EX)
        if found is not None:
            return found
        time.sleep(0.02)
    return None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock."""
    with contextlib.suppress(OSError):
        found = locked(path, fcntl.LOCK_EX)
        if found is None:
            return True
        os.close(found)
    return False


if __name__ == "__main__":
    raise SystemExit(run(Path(sys.argv[1])))
