"""Reads the reply of an HTTP server within a time and a size, however slowly or endlessly the server sends."""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import IO, Any, cast

_MOST_BYTES = 1 << 20


def read_reply(connected: socket.socket, until: float) -> tuple[int, bytes]:
    """The status and the body of the reply to a POST. `until`: a time of time.monotonic.

    Raises OSError (TimeoutError if it is too late) or HTTPException. Leaves the socket open.
    """
    response = http.client.HTTPResponse(_Timed(connected, until), method="POST")  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            raise http.client.HTTPException(f"expected at most {_MOST_BYTES:,} bytes, found more")
        if response.length:  # read(n) does not raise if the connection ends early
            raise http.client.IncompleteRead(body, response.length)
        return response.status, body
    finally:
        response.close()


class _Timed(io.RawIOBase):
    """Reads a socket until a time. Has `makefile`, as HTTPResponse expects of a socket.

    The socket's own time-out begins anew with each `recv`, so a server that sends byte by byte would never exceed it.
    """

    def __init__(self, connected: socket.socket, until: float) -> None:
        self._connected, self._until = connected, until

    def makefile(self, mode: str) -> IO[bytes]:
        return cast(IO[bytes], io.BufferedReader(cast(Any, self)))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connected.settimeout(left)
        return self._connected.recv_into(buffer)
