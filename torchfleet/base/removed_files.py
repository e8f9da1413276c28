"""Removes folders with large files without waiting for the file system to free their blocks.

A file of 0.8 GB takes ext4 a second to remove, twice as long as to write. A file that is still open loses its name at
once; its blocks are freed when it is closed, which a thread does here, or when the process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading

_LARGE = 1 << 24  # bytes from which on a file is opened before it is removed
_MOST_OPEN = 64  # files of one folder: a process has a limit of open files
_threads: list[threading.Thread] = []
_lock = threading.Lock()


def remove_folder(folder: str) -> None:
    """Remove a folder with all that is in it. Does nothing if it does not exist."""
    files = _opened(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if files:
        thread = threading.Thread(target=_close, args=(files,), name="removed files", daemon=True)
        with _lock:
            _threads.append(thread)
            thread.start()


def wait_until_freed() -> None:
    """Wait until the blocks of all removed files are free. Call it before as many bytes are written again."""
    with _lock:
        waited, _threads[:] = list(_threads), []
    for thread in waited:
        thread.join()


def _opened(folder: str) -> list[int]:
    """Descriptors of the large files below a folder."""
    files: list[int] = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone, or this user may not open it: rmtree removes what it can
                path = os.path.join(place, name)
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and found.st_size >= _LARGE and len(files) < _MOST_OPEN:
                    files.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK))
    return files


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
