"""The interface of a destination of entries: a log on disk, or a backup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchfleet.ps.net.wire import Frame

PUT_OFF = 0.0005  # seconds


class Sink(Protocol):
    """Takes entries in order, and tells up to which index they are safe. Only the server's loop calls it."""

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """Take an entry without blocking. The sink reads its frames until the entry is confirmed: do not change them. A
        piece of the state has the index of the entry before it."""

    def flush(self, after: float = 0.0) -> None:
        """Do the work that `append` has postponed for batching, if that was at least `after` seconds ago. The server
        calls it when no request waits and, with PUT_OFF, when a reply must wait."""

    def confirmed(self) -> int:
        """The highest index up to which all entries are safe in this sink. Does not block."""

    def trouble(self) -> str:
        """A sentence that says why the sink cannot accept changes now; empty if it can."""

    def close(self) -> None:
        """Release the sink's resources. A log is written to its end first; a backup may miss unconfirmed entries."""
