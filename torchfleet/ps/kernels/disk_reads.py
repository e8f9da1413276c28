"""Reads of many blocks by Linux's asynchronous I/O, without Python's lock: the system calls io_submit and io_getevents.

While a thread waits for the disk here, or checks pages, other threads run Python. The pages of a block are checked as
soon as it has been read, while the disk reads the next blocks.
"""

from __future__ import annotations

import errno

import numpy as np

from torchfleet.ps.kernels.intrinsics import system_call
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.pages import is_page

REQUEST_WORDS, EVENT_WORDS = 8, 4  # struct iocb and struct io_event, in 64-bit words
_BUSY, _INTERRUPTED, _WRONG = errno.EAGAIN, errno.EINTR, errno.EBADMSG
_READ = 0  # the command
_S32 = np.uint64(32)


@inlined
def _prepare(
    requests_DW: np.ndarray, num: int, file: int, offsets_N: np.ndarray, first: int, address: int, size: int
) -> None:
    """Describe the reads from `first` on. The kernel copies descriptions when it takes them."""
    for i in range(num):
        block = first + i
        requests_DW[i, 0] = block  # comes back with the event
        requests_DW[i, 1] = 0
        requests_DW[i, 2] = np.uint64(_READ) | np.uint64(file) << _S32
        requests_DW[i, 3] = address + block * size
        requests_DW[i, 4] = size
        requests_DW[i, 5] = offsets_N[block]


@kernel
def read_blocks(
    submit: int, get_events: int, context: int, file: int, offsets_N: np.ndarray, address: int, size: int,
    requests_DW: np.ndarray, pointers_D: np.ndarray, events_DW: np.ndarray, pages_PD: np.ndarray,
    numbers_P: np.ndarray, results_N: np.ndarray,
) -> None:  # fmt: skip
    """Read blocks of `size` bytes at offsets_N into the memory at `address`, one behind the other. results_N: the bytes
    read of each, or -errno.

    requests_DW, pointers_D to them, events_DW: as many as may be under way in `context`. pages_PD: the same memory as
    pages; a block with a page whose number is not that in numbers_P, or whose checksum is wrong, gets -EBADMSG. Without
    numbers, pages are not checked.
    """
    num, depth, per_block = len(offsets_N), len(requests_DW), len(numbers_P) // max(1, len(offsets_N))
    begun = ended = error = 0
    while ended < (begun if error else num):
        room = min(depth - (begun - ended), num - begun)
        if room > 0 and not error:
            _prepare(requests_DW, room, file, offsets_N, begun, address, size)
            taken = system_call(submit, context, room, pointers_D.ctypes.data, 0)
            if taken >= 0:
                begun += taken
            elif begun == ended or taken not in (-_BUSY, -_INTERRUPTED):
                error = taken
                continue
        fewest = max(1, (begun - ended) // 4)  # the others keep the disk busy meanwhile
        came = system_call(get_events, context, fewest, depth, events_DW.ctypes.data)
        for e in range(came):
            block, result = np.int64(events_DW[e, 0]), np.int64(events_DW[e, 2])
            for page in range(block * per_block, (block + 1) * per_block):
                if result == size and not is_page(pages_PD, page, numbers_P[page]):
                    result = -_WRONG
            results_N[block] = result
        ended += max(0, came)
        if came < 0 and came != -_INTERRUPTED:
            error = came
            ended = begun
    for block in range(begun, num):
        results_N[block] = error
