"""The arrays of whole tables: a copy of one worker's own, or one that all workers of a machine train together.

Workers that train one copy learn from each other with every change, as the threads of one process do. Workers that
have a copy each learn from each other with every exchange. The memory of a common copy is a file without a name
(memfd): it goes when the last of its workers goes, however that ends. Whoever exchanges holds a lock on the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import FleetError
from torchfleet.ps.kernels.vector_instructions import padded
from torchfleet.ps.tables.rows.memory import HUGE_PAGE, Memory

STARTED_AGAIN = (
    "fleet.whole_tables(shared=True): this worker was started again, and nobody comes to meet it a second time. Start "
    "the job again; or use shared=False, where a worker that is started again has a copy of its own."
)
_BOOT = "/proc/sys/kernel/random/boot_id"
_ALIGNED = 64  # bytes: vector instructions load whole cache lines
_PAUSE = 0.001  # seconds before another look whether the lock is free

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint32]
Sizes = Mapping[str, tuple[int, int]]  # by table: rows, dim
Gather = Callable[[str, bytes], list[bytes]]  # what every worker brings


@dataclass(frozen=True)
class Sharing:
    """Who trains this worker's copy: `workers`, in their order, itself among them. `num_copies`: those of the job."""

    workers: tuple[int, ...]
    worker: int
    num_copies: int

    @property
    def position(self) -> int:
        return self.workers.index(self.worker)


def alone(worker: int, num_workers: int) -> Sharing:
    """Every worker has its own copy."""
    return Sharing((worker,), worker, num_workers)


def on_this_machine(gather: Gather, worker: int) -> Sharing:
    """All workers meet: those with one kernel, one space of process numbers and one user share a copy."""
    places: dict[str, list[int]] = {}
    for data in gather("machines of whole tables", f"{worker} {_place(worker)}".encode()):
        number, place = data.decode().split(" ", 1)
        places.setdefault(place, []).append(int(number))
    here = next(workers for workers in places.values() if worker in workers)
    return Sharing(tuple(sorted(here)), worker, len(places))


def _place(worker: int) -> str:
    """The same for two workers if one can open the other's memory. Where there is no memfd, nobody can."""
    if not hasattr(os, "memfd_create"):
        return f"worker {worker}"
    with open(_BOOT) as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


class TableCopy:
    """values[table]: (rows, at least dim); base[table]: (rows, dim); changes[table]: (rows,). Zeros to begin with.

    `received`: per server, the number of the last reply to PULL_CHANGED that is in the copy; 0: it is still empty.
    """

    def __init__(self, sizes: Sizes, num_servers: int, sharing: Sharing, file: int | None = None) -> None:
        """`file`: the memory of a common copy, which this object owns from now on; None: it is this worker's alone."""
        self.sharing, self._file = sharing, file
        memory = Memory(num_bytes(sizes, num_servers)).array(np.uint8) if file is None else _mapped(file)
        arrays = _carved(memory, _shapes(sizes, num_servers))
        self.received: npt.NDArray[np.uint64] = next(arrays)
        self.values: dict[str, Floats] = {}
        self.base: dict[str, Floats] = {}
        self.changes: dict[str, Counts] = {}
        for name in sizes:
            self.values[name], self.base[name], self.changes[name] = next(arrays), next(arrays), next(arrays)

    @contextlib.contextmanager
    def alone(self, seconds: float) -> Iterator[None]:
        """No other worker of this copy exchanges meanwhile; FleetError if one does so for longer than `seconds`."""
        if self._file is None:
            yield
            return
        deadline = time.monotonic() + seconds
        while not _is_locked(self._file):
            if time.monotonic() > deadline:
                raise FleetError(
                    f"for {seconds:g} s (sync_timeout) another worker of this machine has been exchanging the copy "
                    f"that workers {', '.join(map(str, self.sharing.workers))} train together: look at their logs"
                )
            time.sleep(_PAUSE)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up the lock's file; the arrays stay as long as somebody holds them."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def common_copy(sizes: Sizes, num_servers: int, sharing: Sharing, gather: Gather) -> TableCopy:
    """The copy of all `sharing.workers`. All workers of the job meet here."""
    first, file = sharing.workers[0], -1
    if sharing.worker == first:
        file = os.memfd_create("whole tables")
        os.truncate(file, num_bytes(sizes, num_servers))
    brought = gather("memory of whole tables", f"{sharing.worker} {os.getpid()} {file}".encode())
    if sharing.worker != first:
        _, pid, number = next(data.decode().split() for data in brought if int(data.split()[0]) == first)
        file = _opened(f"/proc/{pid}/fd/{number}", first)
    gather("whole tables are open", b"")  # the first worker may end before others train
    return TableCopy(sizes, num_servers, sharing, file)


def _opened(path: str, worker: int) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except OSError as error:
        raise FleetError(
            f"the memory of worker {worker} on this machine cannot be opened ({path}: {error.strerror}). Is it still "
            "running? fleet.whole_tables(shared=False) gives every worker a copy of its own."
        ) from error


def num_bytes(sizes: Sizes, num_servers: int) -> int:
    return sum(_room(*shape) for shape in _shapes(sizes, num_servers))


def _shapes(sizes: Sizes, num_servers: int) -> Iterator[tuple[tuple[int, ...], npt.DTypeLike]]:
    yield (num_servers,), np.uint64
    for num_rows, dim in sizes.values():
        yield (num_rows, dim if dim == 1 else padded(dim)), np.float32
        yield (num_rows, dim), np.float32
        yield (num_rows,), np.uint32


def _room(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED


def _carved(
    memory: npt.NDArray[np.uint8], shapes: Iterator[tuple[tuple[int, ...], npt.DTypeLike]]
) -> Iterator[npt.NDArray[Any]]:
    at = 0
    for shape, dtype in shapes:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        yield memory[at : at + size].view(dtype).reshape(shape)
        at += _room(shape, dtype)


def _mapped(file: int) -> npt.NDArray[np.uint8]:
    mapped = mmap.mmap(file, 0)
    if len(mapped) > HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice: many kernels have small pages alone for such memory
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def _is_locked(file: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
