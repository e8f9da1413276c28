"""Socket filters by which the kernel drops packets of a TCP connection. Linux only.

libzmq 4.3.5 aborts its process when a connection is reset, by the peer or by a shutdown of both directions, while the
queue of its requests is full and there is a heartbeat in what libzmq has read already: it answers the heartbeat on a
connection that it knows to have ended. A connection that ignores resets ends in order: what was sent is read first.
"""

from __future__ import annotations

import ctypes
import socket
import struct

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which the module socket does not name
_STEP = struct.Struct("=HBBI")  # struct sock_filter: code, steps to skip if true, if false, operand
_PROGRAM = struct.Struct("@HP")  # struct sock_fprog: number of steps, their address
_LOAD_BYTE, _SKIP_IF_BIT, _RETURN = 0x30, 0x45, 0x06
_FLAGS, _RESET = 13, 0x04  # the offset of the flags in a TCP header, and the flag RST
_NOTHING, _ALL = 0, 0xFFFFFFFF  # bytes of a packet that a filter keeps

_NO_RESETS = (
    (_LOAD_BYTE, 0, 0, _FLAGS),
    (_SKIP_IF_BIT, 0, 1, _RESET),
    (_RETURN, 0, 0, _NOTHING),
    (_RETURN, 0, 0, _ALL),
)
_NO_PACKETS = ((_RETURN, 0, 0, _NOTHING),)


def take_no_resets(connection: socket.socket) -> None:
    """Ignore resets from the peer. On a listening socket: for every connection that it accepts from now on. The end of
    the stream, or keepalive, shows that a peer is gone. Raises OSError if the kernel has no such filters.
    """
    _attach(connection, _NO_RESETS)


def take_no_packets(connection: socket.socket) -> None:
    """Ignore everything that the peer sends from now on. Raises OSError if the kernel has no such filters."""
    _attach(connection, _NO_PACKETS)


def _attach(connection: socket.socket, steps: tuple[tuple[int, int, int, int], ...]) -> None:
    code = ctypes.create_string_buffer(b"".join(_STEP.pack(*step) for step in steps))
    connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _PROGRAM.pack(len(steps), ctypes.addressof(code)))
