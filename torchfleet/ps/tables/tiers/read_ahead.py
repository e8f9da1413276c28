"""Pages of cold rows that are read in threads, before the request that needs them is served.

A page never changes while its number stays the same, so a page that was read ahead is as good as one that is read when
it is needed; pages whose numbers have changed since are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.pages import find_read
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.tiers.cold_file import PageReader, Pages
from torchfleet.ps.tables.tiers.pages import Words

MOST_REQUESTS = 4  # whose pages are read ahead
MOST_PAGES = 1 << 13  # of one request
THREADS = 2  # while one computes checksums, the disk reads for the other


@dataclass
class _Request:
    """The reading of each part of one request's pages."""

    num_pages: int
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
    """Reads pages for requests that wait. Owned by one thread; its own threads use the readers."""

    def __init__(self, page_bytes: int, make_reader: Callable[[], PageReader]) -> None:
        self._page_bytes, self._make_reader = page_bytes, make_reader
        self._threads: list[tuple[ThreadPoolExecutor, PageReader]] = []
        self._requests: list[_Request | None] = [None] * MOST_REQUESTS
        self._next = 0  # the request that was begun first, which the next one replaces
        # Request i has the pages from i * MOST_PAGES on; those that no request needs are address space only.
        num_pages = MOST_REQUESTS * MOST_PAGES
        self.memory: Words = Memory(num_pages * page_bytes, is_sparse=True).array(np.uint32)
        self._pages = np.full(num_pages, -1, np.int64)  # of the file, by place in `memory`
        self._numbers = np.zeros(num_pages, np.int64)
        self._places = np.zeros(1, np.int32)  # by page of the file: where it was read to last; find_read checks it

    def begin(self, pages: Pages, numbers: Pages) -> None:
        """Begin to read distinct pages, which have these numbers: the first MOST_PAGES of them."""
        if not self._threads:
            self._threads = [
                (ThreadPoolExecutor(1, thread_name_prefix="read-ahead"), self._make_reader()) for _ in range(THREADS)
            ]
        pages, numbers = pages[:MOST_PAGES], numbers[:MOST_PAGES]
        last = int(pages.max())
        if last >= len(self._places):
            self._places = np.append(self._places, np.zeros(last, np.int32))
        first = self._next * MOST_PAGES
        before = self._requests[self._next]
        if before is not None:
            before.end()
            self._pages[first : first + before.num_pages] = -1
        self._places[pages] = first + np.arange(len(pages))
        self._pages[first : first + len(pages)], self._numbers[first : first + len(pages)] = pages, numbers
        self._requests[self._next] = _Request(len(pages), self._read(pages, numbers, first))
        self._next = (self._next + 1) % MOST_REQUESTS

    def _read(self, pages: Pages, numbers: Pages, first: int) -> Sequence[Future[None]]:
        """Begin to read pages to the places from `first` on in the memory."""
        memory = self.memory.view(np.uint8)[: MOST_REQUESTS * MOST_PAGES * self._page_bytes]
        own = memory.reshape(-1, self._page_bytes)[first : first + len(pages)]
        cuts = np.linspace(0, len(pages), THREADS + 1).astype(int).tolist()
        return [
            thread.submit(reader.read, pages[start:stop], numbers[start:stop], own[start:stop])
            for (thread, reader), start, stop in zip(self._threads, cuts[:-1], cuts[1:], strict=True)
            if start < stop
        ]

    def places_of(self, pages: Pages, numbers: Pages) -> Pages:
        """Where in `memory` the pages are that were read ahead, until the next `begin`; -1 for others. Waits until they
        are read.
        """
        places = np.empty(len(pages), np.int64)
        find_read(self._places, self._pages, self._numbers, pages, numbers, places)
        requests = places // MOST_PAGES  # -1 stays -1
        for i, request in enumerate(self._requests):
            own = requests == i
            if request is not None and own.any() and not request.end():
                places[own] = -1
        return places

    def close(self) -> None:
        for thread, reader in self._threads:
            thread.shutdown()
            reader.close()
