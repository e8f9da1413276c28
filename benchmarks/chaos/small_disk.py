"""A disk of our own (tmpfs) for the logs of servers, which can be filled and freed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SIZE = 4 << 30  # bytes that it may hold; memory is used for what is on it
_BIT = 1 << 20
_TRIES = 100


class DiskError(Exception):
    """A disk cannot be made here, or not be filled."""


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder, self._filling = folder, folder / "filling"

    def fill(self) -> None:
        """Nothing more can be written, and all that is there stays."""
        for _ in range(_TRIES):  # what is written meanwhile may be more than it shall hold
            used = os.statvfs(self.folder)
            held = (used.f_blocks - used.f_bfree) * used.f_frsize
            if _remount(self.folder, held + _BIT):
                break
        else:
            raise DiskError(f"the disk at {self.folder} cannot be made smaller")
        with contextlib.suppress(OSError), self._filling.open("wb", buffering=0) as filling:
            while True:
                filling.write(bytes(4096))

    def free(self) -> None:
        self._filling.unlink(missing_ok=True)
        if not _remount(self.folder, _SIZE):
            raise DiskError(f"the disk at {self.folder} does not become larger again")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mounted at `folder` while the block runs. Raises DiskError where that is not allowed."""
    if os.geteuid() != 0:
        raise DiskError("a disk of its own needs root, or a container with CAP_SYS_ADMIN")
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE},mode=700", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DiskError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def _remount(folder: Path, size: int) -> bool:
    command = ["mount", "-o", f"remount,size={size}", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
