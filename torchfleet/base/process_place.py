"""Where this process runs, as it says in messages to other processes."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class ProcessPlace(NamedTuple):
    host: str
    pid: int


_given: ProcessPlace | None = None


def own_place() -> ProcessPlace:
    """Return the place of this process. It is read at each call, since the process may have been forked."""
    return _given or ProcessPlace(socket.gethostname(), os.getpid())


def give_place(place: ProcessPlace) -> None:
    """Make `own_place` return this place instead. In a simulation, real pids of different lengths would give messages
    different lengths, and so different times, in every run."""
    global _given
    _given = place
