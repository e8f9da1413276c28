"""Communication among workers, through the servers: gather values, send parcels, share files."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy.typing as npt

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.ps.net.wire import Array
from torchfleet.ps.worker.client.client import Client

Parcel = list[npt.NDArray[Any]]

_PAUSE = 0.005  # seconds between two polls for parcels or for room


class Workers:
    """One worker's access to all workers of the job. Used by one thread, with its own client."""

    def __init__(
        self,
        client: Client,
        index: int,
        num: int,
        timeout: float,
        passes: Counter[str] | None = None,
        on_files: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_files`: called before this worker takes part in a shared list of files."""
        self._on_files = on_files
        self._client, self.index, self.num, self._timeout = client, index, num, timeout
        # passes of this process over shared lists so far, by name
        self._passes = Counter() if passes is None else passes
        self._round = 0

    def gather(self, name: str, data: bytes, num_servers: int = 0) -> list[bytes]:
        """Each worker's data, in order. Collective over all workers that have not left.

        With `num_servers`, this number of servers also takes part; their data follows that of the workers.
        """
        self._round += 1
        found = self._client.gather(name, self._round, data, self.num + num_servers, self._timeout)
        return [found[worker] for worker in sorted(found)]

    def exchange(self, topic: str) -> Exchange:
        """An exchange of parcels. `topic` must be new, and the same on all workers."""
        return Exchange(self._client, topic, self.index, self.num, self._timeout)

    def files(self, name: str, paths: Sequence[str], lease: float) -> SharedFiles:
        """This worker's side of the next pass over a shared list of files. Takes ownership of the client."""
        try:
            self._on_files()
            shared = SharedFiles(self._client, name, self._passes[name], paths, lease)
        except BaseException:
            self._client.close()
            raise
        self._passes[name] += 1
        return shared

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class Exchange:
    """Parcels to and from all other workers, each delivered exactly once."""

    _client: Client
    _topic: str
    _index: int
    _num: int
    _timeout: float
    _sent: dict[int, int] = field(default_factory=dict)
    _received: int = 0

    def send(self, to: int, arrays: list[npt.NDArray[Any]], on_parcel: Callable[[Parcel], None]) -> None:
        """Returns when the servers have the parcel. While they have no room, passes arriving parcels to `on_parcel`."""
        self._sent[to] = self._sent.get(to, 0) + 1
        deadline = time.monotonic() + self._timeout
        while not self._client.send(self._topic, to, self._sent[to], [Array(0, array) for array in arrays]):
            if self.take(on_parcel):
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                raise FleetError(
                    f"for {self._timeout:g} s the servers have had no room for another parcel to worker {to}, because "
                    "workers have not fetched their parcels. Look at the log of that worker, and at those of others."
                )
            time.sleep(_PAUSE)

    def take(self, on_parcel: Callable[[Parcel], None]) -> int:
        """Pass newly arrived parcels to `on_parcel`; returns how many."""
        parcels = self._client.take(self._topic, self._index, self._received)
        for number, arrays in parcels:
            on_parcel(arrays)
            self._received = number
        return len(parcels)

    def take_until(self, is_enough: Callable[[], bool], on_parcel: Callable[[Parcel], None]) -> None:
        deadline = time.monotonic() + self._timeout
        while not is_enough():
            if self.take(on_parcel):
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                raise FleetError(
                    f"for {self._timeout:g} s no parcel has come from the other workers; look at their logs"
                )
            else:
                time.sleep(_PAUSE)

    def finish(self) -> None:
        """Acknowledge the last parcels, so that the servers can forget them."""
        self._client.take(self._topic, self._index, self._received)


class SharedFiles:
    """Takes files from the servers' list, for any number of threads, and renews its lease from a background thread."""

    def __init__(self, client: Client, name: str, number: int, paths: Sequence[str], lease: float) -> None:
        self._client, self._name, self._number, self._lease = client, name, number, lease
        self._lock = threading.Lock()
        self._wish, self._paths = 0, frozenset(paths)
        self._over = threading.Event()
        self._thread = BackgroundThreads([self._stay_alive], "shared files")
        self._ask(files=list(paths))
        self._thread.start()

    def take(self) -> str | None:
        """The next file; None at the end; "" if there is none for now, but a dead worker's file may come back."""
        with self._lock:
            self._wish += 1
            what, path = self._ask(take=self._wish)
        if what == "file":
            if path not in self._paths:
                raise FleetError(
                    f"file list '{self._name}': the servers gave out {path!r:.300}, which is not in this worker's list"
                )
            return path
        return None if what == "end" else ""

    def done(self, path: str) -> None:
        with self._lock:
            self._ask(done=[path])

    def close(self) -> None:
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._client.close()

    def _ask(self, **fields: Any) -> tuple[str, str]:
        self._thread.check()  # the next caller of `take` gets the error
        return self._client.files({"name": self._name, "number": self._number, "lease": self._lease, **fields})

    def _stay_alive(self) -> None:
        while not self._over.wait(self._lease / 5):
            with self._lock:
                self._ask()
