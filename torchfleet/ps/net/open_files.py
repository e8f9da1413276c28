"""The limit of open files: raised as far as it goes; and at it, newcomers at a server's door are turned away.

Without this a server that can take no more connections would be kept busy by those that wait at its door: ZeroMQ tries
to accept them again and again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import sys

_MOST = 1024  # newcomers that are turned away at a time


class OpenFiles:
    """The files that this process may still open, and the listening socket of a server. Belongs to its loop."""

    def __init__(self, listening: socket.socket | None) -> None:
        """`listening` is closed with this; None if nobody can wait at it."""
        self._limit = _raise_limit()
        self._listening = listening
        self._spare = os.open(os.devnull, os.O_RDONLY)  # given up for a moment to accept a newcomer with
        self.num_turned_away = 0

    def look(self) -> None:
        """If no file can be opened any more, turn away those who wait, so that those who are in are served."""
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
        with contextlib.suppress(OSError):  # BlockingIOError: nobody waits; or ZeroMQ was faster
            for _ in range(_MOST):
                listening.accept()[0].close()
                self.num_turned_away += 1
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)


def _raise_limit() -> int:
    """The number of files that this process may have open, which is made the largest that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
