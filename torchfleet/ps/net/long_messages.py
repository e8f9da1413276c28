"""Drops the rest of a message with too many frames, by a compiled loop over libzmq's functions.

ZeroMQ delivers no other message before the last frame of this one was received. Receiving a million frames takes ten
seconds in Python, and a quarter of a second in the compiled loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import zmq

_MANY = 1 << 14  # frames after which compiling the loop pays off


def drop_rest(source: zmq.Socket[bytes]) -> int:
    """Receive and drop the remaining frames of a message. Returns their number."""
    dropped, room = 0, bytearray(64)
    while source.get(zmq.RCVMORE):
        if dropped >= _MANY and (drop := _compiled()) is not None:
            return dropped + drop(source)
        source.recv_into(room)
        dropped += 1
    return dropped


@cache
def _compiled() -> Callable[[zmq.Socket[bytes]], int] | None:
    """The compiled loop; None if pyzmq's extension does not export libzmq's functions. Python then drops the frames."""
    import numba  # here, because most processes never need it

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
