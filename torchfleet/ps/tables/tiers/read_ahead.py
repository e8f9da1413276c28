"""Pages of cold rows that are read in a thread, before the request that needs them is served.

A page never changes while its number stays the same, so a page that was read ahead is as good as one that is read when
it is needed; pages whose numbers have changed since are read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.tiers.cold_file import PageReader, Pages, Room
from torchfleet.ps.tables.tiers.disk import Bytes

MOST_REQUESTS = 4  # whose pages are read ahead
MOST_PAGES = 1 << 13  # of one request


@dataclass
class _Request:
    """The pages of one request. `pages` is sorted."""

    room: Room
    pages: Pages
    numbers: Pages
    memory: Bytes
    reading: Future[None] = field(default_factory=Future)


class ReadAhead:
    """Reads pages for requests that wait. Owned by one thread; it uses `reader` in another."""

    def __init__(self, page_bytes: int, reader: PageReader) -> None:
        self._page_bytes, self._reader = page_bytes, reader
        self._thread: ThreadPoolExecutor | None = None
        self._requests: deque[_Request] = deque()  # the oldest first
        self._rooms = [Room() for _ in range(MOST_REQUESTS)]

    def begin(self, pages: Pages, numbers: Pages) -> None:
        """Begin to read distinct pages, in ascending order, which have these numbers."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        if not self._rooms:
            self._rooms.append(self._ended(self._requests.popleft()).room)
        room, pages, numbers = self._rooms.pop(), pages[:MOST_PAGES], numbers[:MOST_PAGES]
        memory = room.take(len(pages), self._page_bytes)
        made = _Request(room, pages, numbers, memory)
        made.reading = self._thread.submit(self._reader.read, pages, numbers, memory)
        self._requests.append(made)

    def found(self, pages: Pages, numbers: Pages) -> Iterator[tuple[Pages, Bytes, Pages]]:
        """Yield (positions in `pages`, memory, positions in memory) of pages that were read ahead. A page may come
        twice. Waits until they are read.
        """
        for request in self._requests:
            at = np.minimum(np.searchsorted(request.pages, pages), len(request.pages) - 1)
            is_here = (request.pages[at] == pages) & (request.numbers[at] == numbers)
            if is_here.any() and self._ended(request).reading.exception() is None:
                positions = np.flatnonzero(is_here)
                yield positions, request.memory, at[positions]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._reader.close()

    @staticmethod
    def _ended(request: _Request) -> _Request:
        """Wait until the pages are read. A page that cannot be read is read again by the request, which then fails."""
        error = request.reading.exception()
        if error is not None and not isinstance(error, TableError):
            raise error
        return request
