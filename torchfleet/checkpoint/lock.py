"""A lock on a folder: one process at a time replaces its manifest."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from torchfleet.storage import Storage


@contextlib.contextmanager
def alone(storage: Storage) -> Iterator[None]:
    """Held from reading a manifest to removing what its successor does not name; others wait for it.

    Folders on this machine only: elsewhere there is nothing to hold on to. Ends with the process that holds it.
    """
    if not storage.is_local or not os.path.isdir(storage.path):
        yield
        return
    folder = os.open(storage.path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # network file systems lock no folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
