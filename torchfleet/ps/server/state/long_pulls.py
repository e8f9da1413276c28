"""Pulls that are done in slices, and what their clients asked after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchfleet.base.errors import ServerBusy
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.transport import Peer

MAX_BEHIND = 16  # requests
MAX_BYTES_BEHIND = 1 << 25


@dataclass
class Line:
    """A client's requests behind its long pull, in their order: whoever pushes after a pull is not to see it in it."""

    work: Iterator[bool]
    behind: deque[Request] = field(default_factory=deque)


class LongPulls:
    """Those under way, by client: one slice of each in turn."""

    def __init__(self) -> None:
        self._lines: dict[Peer, Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def begin(self, peer: Peer, work: Iterator[bool]) -> None:
        self._lines[peer] = Line(work)

    def is_under_way(self, peer: Peer) -> bool:
        return bool(self._lines) and peer in self._lines

    def wait_behind(self, request: Request) -> None:
        """The request waits for the pull of its client, until `work` gives it back. Raises ServerBusy if there is no
        room for it."""
        behind = self._lines[request.peer].behind
        num_bytes = sum(waiting.num_bytes for waiting in behind)
        if len(behind) >= MAX_BEHIND or (behind and num_bytes + request.num_bytes > MAX_BYTES_BEHIND):
            raise ServerBusy(
                f"{len(behind)} requests of {num_bytes:,} bytes wait for a long pull of this client, at most "
                f"{MAX_BEHIND} and {MAX_BYTES_BEHIND:,}. Wait for its answer."
            )
        behind.append(request)

    def work(self) -> list[Request]:
        """One slice of the pull that has waited longest; returns the requests that waited for it, if it is done."""
        peer = next(iter(self._lines))
        line = self._lines.pop(peer)
        if next(line.work, None) is None:
            return list(line.behind)
        self._lines[peer] = line  # behind all others
        return []
