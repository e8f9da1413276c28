"""Decides which keys may connect. Answers ZeroMQ's requests (ZAP, RFC 27) in the server's own loop, without a thread.

A known key is accepted at once. An unknown key is refused after a delay, so that a client that reconnects in a loop
costs the server one handshake a second, not as many as it can make.
"""

from __future__ import annotations

import contextlib
from collections import deque

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks
_VERSION, _OK, _REFUSED = b"1.0", b"200", b"400"
DELAY = 1.0  # seconds before an unknown key is refused
MAX_PER_TURN = 16  # ZAP requests answered between two requests of clients
MAX_DELAYED = 1024  # waiting refusals; further ones are not sent, and their handshakes time out


class AdmissionDesk:
    """Accepts known keys and refuses others. Owned by the thread that serves."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: frozenset[bytes]) -> None:
        """`known`: public keys in printable form. Make the desk before binding the socket that it decides for."""
        self._known = known
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)
        self._delayed: deque[tuple[float, list[bytes], bytes]] = deque()

    def answer(self, now: float) -> None:
        """Answer up to MAX_PER_TURN requests, and send the refusals that are due. Does not block."""
        for _ in range(MAX_PER_TURN):
            with contextlib.suppress(zmq.Again):
                self._take(self.socket.recv_multipart(zmq.NOBLOCK), now)
                continue
            break
        while self._delayed and self._delayed[0][0] <= now:
            _, way, number = self._delayed.popleft()
            self._reply(way, number, _REFUSED, b"unknown key", b"")

    def close(self) -> None:
        self.socket.close(linger=0)

    def _take(self, frames: list[bytes], now: float) -> None:
        split = frames.index(b"") + 1  # the return address ends here, and the question begins
        way, question = frames[:split], frames[split:]
        if len(question) < 7 or question[0] != _VERSION or question[5] != b"CURVE":
            return  # not a ZAP request for CURVE: without an answer the handshake times out
        key = z85.encode(question[6])
        if key in self._known:
            self._reply(way, question[1], _OK, b"OK", key)
        elif len(self._delayed) < MAX_DELAYED:
            self._delayed.append((now + DELAY, way, question[1]))

    def _reply(self, way: list[bytes], number: bytes, status: bytes, text: bytes, user: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the connection is gone
            self.socket.send_multipart([*way, _VERSION, number, status, text, user, b""], zmq.NOBLOCK)
