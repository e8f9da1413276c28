"""The arrays of whole tables: one worker's own copy, or one that all workers of a machine train together.

Workers that train one copy see each other's changes at once, as the threads of one process do. Workers with separate
copies see them at every exchange. A common copy lies in an anonymous file (memfd), which is freed when the last of its
workers ends, however it ends. A worker holds a lock on the file during an exchange.
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
    "fleet.whole_tables(shared=True): this worker was restarted, and the other workers do not meet it a second time. "
    "Restart the job; or use shared=False, where a worker that is started again has a copy of its own."
)
_BOOT = "/proc/sys/kernel/random/boot_id"
_ALIGNED = 64  # bytes: vector instructions load whole cache lines
_PAUSE = 0.001  # seconds between two attempts to take the lock

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint32]
Sizes = Mapping[str, tuple[int, int]]  # by table: rows, dim
Gather = Callable[[str, bytes], list[bytes]]  # collects every worker's data


@dataclass(frozen=True)
class Sharing:
    """The workers that train this worker's copy: `workers`, in order, including itself. `num_copies`: copies in the
    job.
    """

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
    """Collective over all workers: those with the same kernel, pid namespace and user share a copy."""
    places: dict[str, list[int]] = {}
    for data in gather("machines of whole tables", f"{worker} {_place(worker)}".encode()):
        number, place = data.decode().split(" ", 1)
        places.setdefault(place, []).append(int(number))
    here = next(workers for workers in places.values() if worker in workers)
    return Sharing(tuple(sorted(here)), worker, len(places))


def _place(worker: int) -> str:
    """Equal for two workers if one can open the other's memory. Without memfd it is unique to each worker."""
    if not hasattr(os, "memfd_create"):
        return f"worker {worker}"
    with open(_BOOT) as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


class TableCopy:
    """values[table]: (rows, at least dim); base[table]: (rows, dim); changes[table]: (rows,). Initially zeros.

    `received`: per server, the number of the last reply to PULL_CHANGED in the copy; 0: the copy is still empty.
    """

    def __init__(self, sizes: Sizes, num_servers: int, sharing: Sharing, file: int | None = None) -> None:
        """`file`: the memory of a common copy, which this object then owns; None: the copy is this worker's alone."""
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
        """Hold the copy's exchange lock. Raises FleetError if another worker holds it for longer than `seconds`."""
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
        """Close the lock's file; the arrays stay valid as long as they are referenced."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def common_copy(sizes: Sizes, num_servers: int, sharing: Sharing, gather: Gather) -> TableCopy:
    """The common copy of `sharing.workers`. Collective over all workers of the job."""
    first, file = sharing.workers[0], -1
    if sharing.worker == first:
        file = os.memfd_create("whole tables")
        os.truncate(file, num_bytes(sizes, num_servers))
    brought = gather("memory of whole tables", f"{sharing.worker} {os.getpid()} {file}".encode())
    if sharing.worker != first:
        _, pid, number = next(data.decode().split() for data in brought if int(data.split()[0]) == first)
        file = _opened(f"/proc/{pid}/fd/{number}", first)
    gather("whole tables are open", b"")  # the first worker may end before others have opened the file
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
        with contextlib.suppress(OSError):  # advice: many kernels have no huge pages for such memory
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def _is_locked(file: int) -> bool:
    """Try to take the lock; returns whether it is now held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
