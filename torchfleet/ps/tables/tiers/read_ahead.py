"""Pages of cold rows that are read in threads, before the request that needs them is served.

A page never changes while its number stays the same, so a page that was read ahead is as good as one that is read when
it is needed; pages whose numbers have changed since are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.tiers.cold_file import PageReader, Pages, Room
from torchfleet.ps.tables.tiers.disk import Bytes

MOST_REQUESTS = 4  # whose pages are read ahead
MOST_PAGES = 1 << 13  # of one request
THREADS = 2  # while one computes checksums, the disk reads for the other


@dataclass
class _Request:
    """The pages of one request, and the reading of each part of them."""

    pages: Pages
    numbers: Pages
    memory: Bytes
    reading: Sequence[Future[None]]

    def end(self) -> bool:
        """Wait until the pages are read. Returns whether all could be: a page that cannot be read is read again by the
        request, which then fails.
        """
        errors = [future.exception() for future in self.reading]
        for error in errors:
            if error is not None and not isinstance(error, TableError):
                raise error
        return not any(errors)


class ReadAhead:
    """Reads pages for requests that wait. Owned by one thread; it uses the readers in others."""

    def __init__(self, page_bytes: int, make_reader: Callable[[], PageReader]) -> None:
        self._page_bytes, self._make_reader = page_bytes, make_reader
        self._threads: list[tuple[ThreadPoolExecutor, PageReader]] = []
        self._requests: list[_Request | None] = [None] * MOST_REQUESTS
        self._rooms = [Room() for _ in range(MOST_REQUESTS)]
        self._next = 0  # of the requests: the one that was begun first
        # By page of the file: where it was read to last, as request * MOST_PAGES + position. Compared when it is used.
        self._places = np.zeros(1, np.int32)

    def begin(self, pages: Pages, numbers: Pages) -> None:
        """Begin to read distinct pages, in ascending order, which have these numbers."""
        if not self._threads:
            self._threads = [
                (ThreadPoolExecutor(1, thread_name_prefix="read-ahead"), self._make_reader()) for _ in range(THREADS)
            ]
        pages, numbers = pages[:MOST_PAGES], numbers[:MOST_PAGES]
        if pages[-1] >= len(self._places):
            self._places = np.append(self._places, np.zeros(int(pages[-1]), np.int32))
        self._places[pages] = self._next * MOST_PAGES + np.arange(len(pages))
        before = self._requests[self._next]
        if before is not None:
            before.end()
        memory = self._rooms[self._next].take(len(pages), self._page_bytes)
        cuts = np.linspace(0, len(pages), THREADS + 1).astype(int).tolist()
        reading = [
            thread.submit(reader.read, pages[start:stop], numbers[start:stop], memory[start:stop])
            for (thread, reader), start, stop in zip(self._threads, cuts[:-1], cuts[1:], strict=True)
            if start < stop
        ]
        self._requests[self._next] = _Request(pages, numbers, memory, reading)
        self._next = (self._next + 1) % MOST_REQUESTS

    def found(self, pages: Pages, numbers: Pages) -> Iterator[tuple[Pages, Bytes, Pages]]:
        """Yield (positions in `pages`, memory, positions in memory) of pages that were read ahead. Waits until they are
        read.
        """
        requests, places = np.divmod(self._places[np.minimum(pages, len(self._places) - 1)], MOST_PAGES)
        for i, request in enumerate(self._requests):
            if request is None:
                continue
            own = np.flatnonzero((requests == i) & (places < len(request.pages)))
            at = places[own].astype(np.int64)
            is_here = (request.pages[at] == pages[own]) & (request.numbers[at] == numbers[own])
            if is_here.any() and request.end():
                yield own[is_here], request.memory, at[is_here]

    def close(self) -> None:
        for thread, reader in self._threads:
            thread.shutdown()
            reader.close()
