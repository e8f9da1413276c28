"""Raises the limit of open files, and closes new connections once the limit is reached.

Otherwise ZeroMQ would try to accept the waiting connections again and again, and keep the server busy.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys

_MOST = 1024  # connections that are closed at a time
_RESERVE = 8  # descriptors that are kept for accept(), since ZeroMQ takes some of them as soon as they are free


class OpenFiles:
    """Watches the limit of open files for a listening socket. Owned by the server's loop."""

    def __init__(self, listening: socket.socket | None) -> None:
        """Takes ownership of `listening`; None: there is no socket to accept from."""
        self._limit = raise_limit()
        self._listening = listening
        self._reserve: list[int] = []
        self._fill()
        self._was_full = False

    def lacking(self) -> int:
        """The number of descriptors that the reserve lacks: ZeroMQ has accepted this many connections with them."""
        self._fill()
        return _RESERVE - len(self._reserve)

    def look(self) -> None:
        """If the limit is reached, close the connections that wait, so that the accepted ones are served."""
        if self._listening is not None and not self._fill():
            self._turn_away(self._listening)
            self._fill()

    def close(self) -> None:
        self._release()
        if self._listening is not None:
            self._listening.close()

    def _fill(self) -> bool:
        """Fill the reserve. Returns False if no descriptor is free beside it."""
        try:
            while len(self._reserve) < _RESERVE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY))
            os.close(os.dup(self._reserve[0]))
        except OSError:
            return False
        return True

    def _release(self) -> None:
        while self._reserve:
            os.close(self._reserve.pop())

    def _turn_away(self, listening: socket.socket) -> None:
        if not self._was_full:
            print(
                f"torchfleet server: {self._limit:,} files and connections are open, which is all that `ulimit -n` "
                "allows. New connections are closed; existing ones are served. Start the server with a "
                "higher `ulimit -n`, or with fewer workers.",
                file=sys.stderr,
                flush=True,
            )
        self._was_full = True
        self._release()
        with contextlib.suppress(OSError):  # no connection waits, or ZeroMQ was faster
            for _ in range(_MOST):
                listening.accept()[0].close()


def raise_limit() -> int:
    """Raise the limit of open files as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
