"""Messages of too many frames: what is behind the frames that count is read and dropped by libzmq's own functions.

ZeroMQ hands a message over whole, and gives nothing of others before the last frame has been taken. Through Python a
million frames take ten seconds of the loop; a compiled loop takes a quarter of one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import zmq

_MANY = 1 << 14  # frames from which on compiling the loop, once, costs less than it saves


def drop_rest(source: zmq.Socket[bytes]) -> int:
    """Take the frames that are left of a message, and forget them. Returns how many there were."""
    dropped, room = 0, bytearray(64)
    while source.get(zmq.RCVMORE):
        if dropped >= _MANY and (drop := _compiled()) is not None:
            return dropped + drop(source)
        source.recv_into(room)
        dropped += 1
    return dropped


@cache
def _compiled() -> Callable[[zmq.Socket[bytes]], int] | None:
    """The compiled loop; None if pyzmq's extension shows no functions of libzmq: then Python drops the frames."""
    import numba  # here: clients and servers that are never attacked need not compile this

    try:
        from zmq.backend.cython import _zmq  # the extension that is linked to the libzmq of this process

        functions = ctypes.CDLL(_zmq.__file__)
        receive, option = functions.zmq_recv, functions.zmq_getsockopt
    except (ImportError, OSError, AttributeError):
        return None
    receive.restype = option.restype = ctypes.c_int
    receive.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    option.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
    rcvmore = int(zmq.RCVMORE)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def loop(handle: int, room: int, more: Any, more_at: int, size_at: int) -> int:
        dropped = 0
        while more[0] != 0 and receive(handle, room, 64, 0) >= 0:
            dropped += 1
            option(handle, rcvmore, more_at, size_at)
        return dropped

    def drop(source: zmq.Socket[bytes]) -> int:
        room, more, size = np.zeros(64, np.uint8), np.ones(1, np.int32), np.full(1, 4, np.uint64)
        return int(loop(source.underlying, room.ctypes.data, more, more.ctypes.data, size.ctypes.data))

    return drop
