"""The file of cold rows, and memory to read it into."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.tiers.disk import Bytes, open_disk
from torchfleet.ps.tables.tiers.pages import Layout

Pages = npt.NDArray[np.int64]  # of the file, by their place in it


class Closable(Protocol):
    def close(self) -> None: ...


class Room:
    """Memory at the start of a page, for O_DIRECT. It is used again and again, because the system clears new memory."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    def take(self, num: int, size: int) -> Bytes:
        """Room for `num` blocks of `size` bytes. What was in the room before is gone."""
        if num * size > len(self._bytes):
            self._bytes = aligned(num * size)
        return self._bytes[: num * size].reshape(num, size)


class PageReader:
    """Reads pages, or blocks of pages, of a file. Owned by one thread."""

    def __init__(self, file: int, layout: Layout, folder: str) -> None:
        self._disk, self._layout, self._folder = open_disk(file), layout, folder

    def read(self, places: Pages, numbers: Pages, memory: Bytes) -> None:
        """Read pages or blocks into `memory`, one per row. `places`: their places in the file, counted in rows of
        `memory`; `numbers`: of all their pages. Raises TableError if the disk does not return the pages with these
        numbers.
        """
        results = self._disk.read(places * memory.shape[1], memory, numbers)
        wrong = results[results != memory.shape[1]]
        if len(wrong):
            if (wrong == -errno.EBADMSG).any():
                self._layout.check(memory.view(np.uint32), numbers, self._folder)
            raise file_error(self._folder, "cannot be read", -int(wrong[0]) if wrong[0] < 0 else errno.EIO)

    def close(self) -> None:
        self._disk.close()


def file_error(folder: str, what: str, number: int) -> TableError:
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    advice = (
        "Rows that are in memory can still be used; free some space there, or use a larger disk."
        if is_full
        else "The disk or its file is damaged: start again from the last save or log, on another disk."
    )
    return TableError(f"the file of cold rows in {folder} {what}: {os.strerror(number)}. {advice}")


def aligned(num_bytes: int) -> Bytes:
    """New memory at the start of a page."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def open_file(folder: str) -> tuple[int, bool]:
    """(a new file without a name, whether it is read and written past the page cache)."""
    try:
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), False
    except OSError as error:
        raise TableError(
            f"cannot make a file for cold rows in {folder}: {os.strerror(error.errno or errno.EIO)}. Expected a folder "
            "that exists, to which this user can write, on a local disk."
        ) from None


def close_file(file: int, *users: Closable) -> None:
    """Close the users of a file, then the file."""
    for user in users:
        with contextlib.suppress(OSError):
            user.close()
    os.close(file)


def allocate(file: int, start: int, size: int) -> None:
    """Make sure that these bytes of the file have space on the disk. Raises OSError."""
    try:
        os.posix_fallocate(file, start, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(file, start + size)
