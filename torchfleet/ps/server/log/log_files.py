"""Files of a log folder: opened without following links, replaced atomically, and their names synced to the disk."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

from torchfleet.base.errors import LogError


class SyncFailed(OSError):
    """A sync has failed, and must not be repeated: the kernel may have dropped the bytes that it could not write, and
    then the next sync succeeds without them. Has no `errno`, so that it is never taken for a full disk."""


def sync_failed(error: OSError) -> SyncFailed:
    text = os.strerror(error.errno) if error.errno is not None else str(error)
    return SyncFailed(f"a sync has failed ({text}), and what it was to write may be lost")


def sync_folder(path: Path) -> None:
    """Block until the names in this folder are on the disk. Raises OSError; SyncFailed if the sync itself fails."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        raise sync_failed(error) from error
    finally:
        os.close(folder)


def sync_path(path: Path) -> None:
    """Block until the folder's own name, and those of the folders above it, are on the disk. Folders that this process
    may not read were not made by it, and are left out. Raises OSError."""
    for folder in path.resolve().parents:
        with contextlib.suppress(PermissionError):
            sync_folder(folder)
        if os.path.ismount(folder):
            return


def open_file(path: Path, flags: int) -> int:
    """Open a file of the log. Raises LogError if it is a link or a folder, or cannot be opened; OSError if it cannot be
    made."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        found = "a link" if path.is_symlink() else "a folder" if path.is_dir() else ""
        if flags & os.O_CREAT and not found:
            raise
        raise _unusable(path, found or str(error)) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _unusable(path, "something else")
    return file


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file by one with these bytes, durably: after a crash there is the old one or the new one. Raises
    OSError."""
    new = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # left by a process that was killed here
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while data:
            data = data[os.write(file, data) :]
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(new, path)
    sync_folder(path.parent)


def read_file(path: Path, most: int) -> bytes:
    """The first `most` bytes of the file. Raises LogError if it is no file, or cannot be read."""
    file = open_file(path, os.O_RDONLY)
    try:
        return os.read(file, most)
    finally:
        os.close(file)


def drop_pages(file: int, first: int, stop: int) -> None:
    """Tell the kernel that the bytes from `first` to `stop`, which are on the disk, need no memory: later writes reuse
    it. Else a log takes new memory for every byte, and a virtual machine may have to ask its host for each page."""
    first -= first % mmap.PAGESIZE
    with contextlib.suppress(OSError):  # a file system that takes no advice
        os.posix_fadvise(file, first, stop - first, os.POSIX_FADV_DONTNEED)


def map_file(path: Path) -> memoryview:
    """The bytes of a file. The file stays mapped as long as the result, or a slice of it, exists. Raises LogError."""
    file = open_file(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        if not size:
            return memoryview(b"")
        # Kernels require writable memory. The mapping is private, so writes do not reach the file.
        mapped = mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return memoryview(mapped)
    finally:
        os.close(file)


def forget_cached(path: Path) -> None:
    """Drop a file from the kernel's cache: the next read shows what the disk has. Raises LogError or OSError."""
    file = open_file(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _unusable(path: Path, found: str) -> LogError:
    return LogError(
        f"{path}: expected a file that this server can read and write, found {found}. The log is not used, and nothing "
        "of it was changed. Bring the file back, or go on from the last checkpoint, with another folder for the log."
    )
