"""Memory for tables: address space first, pages when they are touched.

A table reserves the address space of its largest size and never moves: growing copies nothing and no kernel ever
sees an array change its place. Untouched pages cost nothing, and read as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.cgroups import memory_limit
from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.table_size import HOW_TO_SET, given_table_bytes

HUGE_PAGE = 2 << 20
RELEASE = 1 << 16  # bytes released at a time: small next to the slots of a map that is being moved
LARGEST_KEPT = 32 << 20  # largest freed buffer that malloc keeps; malloc accepts no higher value
MOST_KEPT = 256 << 20  # free bytes at the end of the heap before it shrinks
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in malloc.h
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def physical_bytes() -> int:
    """The memory that this process may use: the machine's, or its container's limit if that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return machine if limit is None else min(machine, limit)


def available_bytes() -> int:
    """The memory that can be allocated now without swapping; never more than `physical_bytes`."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(physical_bytes(), 1024 * int(line.split()[1]))
    return physical_bytes()


def max_table_bytes() -> int:
    """The largest size of one table: FLEET_MAX_TABLE_BYTES, or all memory that this process may use.

    Raises TableError if the variable is not a size.
    """
    given = given_table_bytes()
    return physical_bytes() if given is None else given


def keep_freed_memory() -> None:
    """Let malloc keep freed memory, up to a bound, for the next message.

    By default malloc returns megabyte buffers to the system as soon as a few adjacent ones are free, and faults them in
    again page by page: with many clients this took a twentieth of a server's time. Other C libraries have no such
    setting.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, MOST_KEPT)


class Memory:
    """A private, zeroed, lazily allocated range of memory."""

    def __init__(self, num_bytes: int, is_sparse: bool = False) -> None:
        """`is_sparse`: many small parts of it are touched, far apart; a huge page for each would waste memory."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._map = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise TableError(
                f"cannot reserve {num_bytes:,} bytes of address space for a table ({error}). Set a smaller "
                f"max_table_bytes ({HOW_TO_SET}), or raise `ulimit -v` or vm.overcommit_memory."
            ) from None
        # The first page stays small, so that a small table is small. Huge pages save a third of a lookup's time.
        if num_bytes > 2 * HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # advice: a kernel without huge pages answers with EINVAL
                self._map.madvise(
                    mmap.MADV_NOHUGEPAGE if is_sparse else mmap.MADV_HUGEPAGE, 0 if is_sparse else HUGE_PAGE
                )
        self._released = 0

    def array(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The whole range as an array, which keeps the memory alive."""
        return np.frombuffer(self._map, dtype, len(self._map) // np.dtype(dtype).itemsize)

    def release_up_to(self, num_bytes: int) -> None:
        """Return the pages of the first `num_bytes` to the system; they read as zeros afterwards."""
        end = num_bytes // RELEASE * RELEASE
        if end > self._released:
            self._map.madvise(mmap.MADV_DONTNEED, self._released, end - self._released)
            self._released = end

    def release(self, start: int, stop: int) -> int:
        """Return the huge pages that lie between these bytes to the system. They read as zeros afterwards, and become
        huge pages again when touched. Returns where the first of them begins, or `stop` if none lies there.
        """
        base = self.array(np.uint8).ctypes.data
        first = -(-(base + start) // HUGE_PAGE) * HUGE_PAGE - base
        behind = (base + stop) // HUGE_PAGE * HUGE_PAGE - base
        if first >= behind:
            return stop
        self._map.madvise(mmap.MADV_DONTNEED, first, behind - first)
        return first

    @property
    def held_bytes(self) -> int:
        return len(self._map) - self._released
