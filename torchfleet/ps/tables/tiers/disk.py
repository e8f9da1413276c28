"""Many reads and writes of one file at a time, past the page cache.

Linux's asynchronous I/O (io_submit) takes a batch of requests in one system call: on the machine of benchmarks/log.md
three times the reads per second of a pool of 32 threads, at a tenth of the processor time. Containers that forbid
io_uring usually allow it. Where it is refused, a pool of threads reads and writes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.disk_reads import EVENT_WORDS, REQUEST_WORDS, read_blocks
from torchfleet.ps.kernels.pages import first_wrong

Offsets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
DEPTH = 256  # requests under way at once; the system has 65,536 for all processes, and counts each twice
THREADS = 32
_NUMBERS = {  # of the system calls: io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_WRITE = 1
_REQUEST = np.dtype(  # struct iocb
    [("data", "u8"), ("key", "u4"), ("flags", "i4"), ("command", "u2"), ("priority", "i2"), ("file", "u4"),
     ("buffer", "u8"), ("length", "u8"), ("offset", "i8"), ("reserved", "u8"), ("more_flags", "u4"),
     ("event_file", "u4")]
)  # fmt: skip
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")])  # struct io_event
_NO_NUMBERS: Numbers = np.empty(0, np.int64)


class Disk(ABC):
    """Reads or writes of an open file: no read begins before all writes have ended. Buffers are aligned, as O_DIRECT
    demands; each request is for one block.
    """

    @abstractmethod
    def read(self, offsets: Offsets, blocks_NB: Bytes, numbers_P: Numbers = _NO_NUMBERS) -> npt.NDArray[np.int64]:
        """Read one block of blocks_NB at each offset, all at once. Returns the bytes read, or -errno, of each.

        numbers_P: the numbers of all pages of the blocks. A block with a page whose number or checksum is wrong gets
        -EBADMSG. Without numbers, pages are not checked.
        """

    @abstractmethod
    def begin_write(self, number: int, offset: int, block: Bytes) -> None:
        """Begin to write a block, which must stay as it is until `end_writes` returns its number."""

    @abstractmethod
    def end_writes(self, fewest: int) -> list[tuple[int, int]]:
        """(number, bytes written or -errno) of the writes that have ended; waits until there are `fewest`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all writes, and release what this object needs for them. The caller closes the file."""


def open_disk(file: int) -> Disk:
    """The fastest way to read and write this open file here."""
    try:
        return _AsynchronousDisk(file)
    except OSError:
        return _ThreadedDisk(file)


class _Queue:
    """One context of asynchronous I/O."""

    def __init__(self) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, "the numbers of its system calls are not known here")
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._context = ctypes.c_ulong(0)
        self._checked(self._call(self._setup, DEPTH, ctypes.byref(self._context)))
        self._events = np.zeros(DEPTH, _EVENT)
        self._requests = np.zeros((DEPTH, REQUEST_WORDS), np.uint64)  # of reads
        self._pointers = self._requests.ctypes.data + self._requests.strides[0] * np.arange(DEPTH, dtype=np.uint64)

    def submit(self, pointers: npt.NDArray[np.uint64]) -> int:
        """Hand over requests; returns how many of them the kernel has taken."""
        num = ctypes.c_long(len(pointers))
        return self._checked(self._call(self._submit, self._context, num, ctypes.c_void_p(pointers.ctypes.data)))

    def events(self, fewest: int) -> Any:
        """The requests that have ended since the last call; waits until there are at least `fewest`."""
        while True:
            try:
                num = self._checked(
                    self._call(
                        self._getevents, self._context, ctypes.c_long(fewest), ctypes.c_long(DEPTH),
                        ctypes.c_void_p(self._events.ctypes.data), None,
                    )
                )  # fmt: skip
                return self._events[:num]
            except InterruptedError:
                continue

    def read(self, file: int, offsets: Offsets, blocks_NB: Bytes, numbers_P: Numbers, results: Offsets) -> None:
        """As Disk.read. No other request may be under way."""
        address, size = blocks_NB.ctypes.data, blocks_NB.shape[1]
        pages_PD = blocks_NB.reshape(max(1, len(numbers_P)), -1).view(np.uint64)
        events = self._events.view(np.uint64).reshape(DEPTH, EVENT_WORDS)
        calls = self._submit, self._getevents, self._context.value
        buffers = self._requests, self._pointers, events
        read_blocks(*calls, file, offsets, address, size, *buffers, pages_PD, numbers_P, results)

    def close(self) -> None:
        self._call(self._destroy, self._context)

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result


class _AsynchronousDisk(Disk):
    def __init__(self, file: int) -> None:
        self._file, self._queue = file, _Queue()
        self._under_way: dict[int, tuple[npt.NDArray[Any], Bytes]] = {}  # writes: request and block

    def read(self, offsets: Offsets, blocks_NB: Bytes, numbers_P: Numbers = _NO_NUMBERS) -> npt.NDArray[np.int64]:
        assert not self._under_way
        results = np.full(len(offsets), -errno.EIO, np.int64)
        if len(offsets):
            self._queue.read(self._file, offsets, blocks_NB, numbers_P, results)
        return results

    def begin_write(self, number: int, offset: int, block: Bytes) -> None:
        request = np.zeros(1, _REQUEST)
        request["data"], request["command"], request["file"] = number, _WRITE, self._file
        request["buffer"], request["length"], request["offset"] = block.ctypes.data, block.nbytes, offset
        self._under_way[number] = request, block
        self._queue.submit(np.array([request.ctypes.data], np.uint64))

    def end_writes(self, fewest: int) -> list[tuple[int, int]]:
        events = self._queue.events(min(fewest, len(self._under_way)))
        ended = [(int(number), int(result)) for number, result in zip(events["data"], events["result"], strict=True)]
        for number, _ in ended:
            del self._under_way[number]
        return ended

    def close(self) -> None:
        while self._under_way:
            self.end_writes(1)
        self._queue.close()


class _ThreadedDisk(Disk):
    def __init__(self, file: int) -> None:
        self._file = file
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tier")
        self._under_way: dict[int, Future[int]] = {}

    def read(self, offsets: Offsets, blocks_NB: Bytes, numbers_P: Numbers = _NO_NUMBERS) -> npt.NDArray[np.int64]:
        by_block = numbers_P.reshape(max(1, len(offsets)), -1)
        found = self._threads.map(self._read, offsets.tolist(), blocks_NB, by_block)
        return np.fromiter(found, np.int64, len(offsets))

    def begin_write(self, number: int, offset: int, block: Bytes) -> None:
        self._under_way[number] = self._threads.submit(self._write, offset, block)

    def end_writes(self, fewest: int) -> list[tuple[int, int]]:
        ended: list[tuple[int, int]] = []
        for number, future in list(self._under_way.items()):
            if len(ended) < fewest or future.done():
                ended.append((number, future.result()))
                del self._under_way[number]
        return ended

    def close(self) -> None:
        self._threads.shutdown()

    def _read(self, offset: int, block: Bytes, numbers_P: Numbers) -> int:
        try:
            num = os.preadv(self._file, [memoryview(block.data)], offset)
        except OSError as error:
            return -(error.errno or errno.EIO)
        pages_PD = block.reshape(max(1, len(numbers_P)), -1).view(np.uint64)
        return num if num != len(block) or first_wrong(pages_PD, numbers_P) < 0 else -errno.EBADMSG

    def _write(self, offset: int, block: Bytes) -> int:
        try:
            return os.pwritev(self._file, [memoryview(block.data)], offset)
        except OSError as error:
            return -(error.errno or errno.EIO)
