"""Finds out what listens at an address: a ZeroMQ socket, with or without keys, something else, or nothing."""

from __future__ import annotations

import contextlib
import socket

_SIZE = 32  # bytes at the start of a ZMTP 3 greeting: signature (10), version (2), mechanism (20)
# Our greeting ends before the mechanism: ZeroMQ hangs up on a wrong one without naming its own.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"


def mechanism_at(host: str, port: int, timeout: float = 2.0) -> str | None:
    """The mechanism of the ZeroMQ socket at this address: NULL without keys, CURVE with keys.

    Empty if something else listens there, None if nothing does. Waits at most `timeout` seconds per network operation.
    """
    try:
        with socket.create_connection((host, port), timeout) as there:
            received = b""
            with contextlib.suppress(OSError):  # another program may say nothing, or hang up
                there.sendall(_GREETING)
                while len(received) < _SIZE and (more := there.recv(_SIZE - len(received))):
                    received += more
    except OSError:
        return None
    if len(received) < _SIZE or received[0] != 0xFF or received[9] != 0x7F:
        return ""
    return received[12:32].rstrip(b"\0").decode("ascii", errors="replace")
