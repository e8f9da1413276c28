"""Raises the limit of open files, and closes new connections once the limit is reached.

Otherwise ZeroMQ would try to accept the waiting connections again and again, and keep the server busy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import sys

_MOST = 1024  # connections that are closed at a time


class OpenFiles:
    """Watches the limit of open files for a listening socket. Owned by the server's loop."""

    def __init__(self, listening: socket.socket | None) -> None:
        """Takes ownership of `listening`; None: there is no socket to accept from."""
        self._limit = _raise_limit()
        self._listening = listening
        self._spare = os.open(os.devnull, os.O_RDONLY)  # closed for a moment, so that accept() has a descriptor
        self.num_turned_away = 0

    def look(self) -> None:
        """If the limit is reached, close the connections that wait, so that the accepted ones are served."""
        try:
            os.close(os.dup(self._spare))
        except OSError as error:
            if error.errno == errno.EMFILE and self._listening is not None:
                self._turn_away(self._listening)

    def close(self) -> None:
        os.close(self._spare)
        if self._listening is not None:
            self._listening.close()

    def _turn_away(self, listening: socket.socket) -> None:
        if not self.num_turned_away:
            print(
                f"torchfleet server: {self._limit:,} files and connections are open, which is all that `ulimit -n` "
                "allows. Newcomers are turned away, and those who are connected are served on. Start the server with a "
                "higher `ulimit -n`, or with fewer workers.",
                file=sys.stderr,
                flush=True,
            )
        os.close(self._spare)
        with contextlib.suppress(OSError):  # BlockingIOError: no connection waits, or ZeroMQ was faster
            for _ in range(_MOST):
                listening.accept()[0].close()
                self.num_turned_away += 1
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)


def _raise_limit() -> int:
    """Raise the limit of open files as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
