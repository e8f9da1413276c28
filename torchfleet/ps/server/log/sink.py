"""The interface of a destination of entries: a file, or another server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchfleet.ps.net.wire import Frame


class Sink(Protocol):
    """Takes entries in order, and reports up to which index they are safe. Only the server's thread calls it."""

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """Take an entry without blocking. The sink may use its frames until the entry is confirmed. A piece of the
        state has the index of the entry before it."""

    def flush(self) -> None:
        """Do the work that was postponed for batching. Called when the server has nothing else to do."""

    def confirmed(self) -> int:
        """The highest index up to which all entries are safe in this sink."""

    def trouble(self) -> str:
        """Why the sink cannot accept changes now, as a sentence; empty if it can."""

    def close(self) -> None:
        """Write or send all appended entries if possible, and release the resources."""
