"""Where entries go: to a file, to another server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchfleet.ps.net.wire import Frame


class Sink(Protocol):
    """Takes entries in their order, and says up to which they are safe. Called by the server's thread alone."""

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """Take an entry, without waiting. Its frames may be used until it is confirmed. Pieces of the state come under
        the index of the entry before them."""

    def flush(self) -> None:
        """The server has nothing else to do: what was put off, to do it together with what follows, is due."""

    def confirmed(self) -> int:
        """The highest index of which all entries are safe there."""

    def trouble(self) -> str:
        """Why no change can be promised now, as a sentence; empty: it can."""

    def close(self) -> None:
        """Bring all that was appended to where it is to be, if that can be, and let go."""
