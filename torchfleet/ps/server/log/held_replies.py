"""Holds replies until the changes that they may show are safe. Memory is bounded: a client whose reply was dropped asks
again, as after any reply that was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.unread import MAX_UNREAD, size_of
from torchfleet.ps.net.wire import Frame

MAX_REPLIES = 1 << 10  # held replies to one client; far more than it has requests under way
MAX_BYTES = MAX_UNREAD  # of these; a single reply may be larger if no other waits for the client
MAX_BYTES_IN_ALL = 1 << 32


class HeldReplies:
    """A queue of replies, each with the index of the entry that must be confirmed first."""

    def __init__(self) -> None:
        # Index, client, reply and its bytes. Callers only check whether it is empty, and do so after every request.
        self.waiting: deque[tuple[int, Peer, list[Frame], int]] = deque()
        self._of_one: dict[Peer, tuple[int, int]] = {}  # by client: replies and their bytes
        self._num_bytes = 0

    @property
    def first_index(self) -> int:
        """The index that the first reply waits for. There must be a reply."""
        return self.waiting[0][0]

    def add(self, index: int, peer: Peer, frames: list[Frame]) -> None:
        """Keep a reply until entry `index` is confirmed. Drops it if its client has others, and too much waits for the
        client or in all."""
        num_bytes = size_of(frames)
        num, before = self._of_one.get(peer, (0, 0))
        is_full = num >= MAX_REPLIES or before + num_bytes > MAX_BYTES or self._num_bytes + num_bytes > MAX_BYTES_IN_ALL
        if num and is_full:
            return
        self.waiting.append((index, peer, frames, num_bytes))
        self._count(peer, 1, num_bytes)

    def confirmed(self, index: int) -> Iterator[tuple[Peer, list[Frame]]]:
        """Yield, and remove, the replies that wait for an entry up to `index`, in order."""
        while self.waiting and self.waiting[0][0] <= index:
            _, peer, frames, num_bytes = self.waiting.popleft()
            self._count(peer, -1, -num_bytes)
            yield peer, frames

    def _count(self, peer: Peer, num: int, num_bytes: int) -> None:
        num_before, bytes_before = self._of_one.get(peer, (0, 0))
        self._num_bytes += num_bytes
        if num_before + num:
            self._of_one[peer] = num_before + num, bytes_before + num_bytes
        else:
            del self._of_one[peer]
