"""Pulls that go on while something else is measured, and how long each took."""

from __future__ import annotations

import threading
import time

import numpy as np

from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client


class SteadyPulls:
    """Pulls of `num_rows` rows out of keys 0 to `num_keys` - 1, one after another, from a client of their own.

    They begin and end with the block; `times` are in milliseconds, each until the rows were there. Nothing is created.
    """

    def __init__(self, endpoint: str, spec: TableSpec, num_keys: int, num_rows: int) -> None:
        self._endpoint, self._spec, self._num_keys, self._num_rows = endpoint, spec, num_keys, num_rows
        self._over = threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> SteadyPulls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        rng = np.random.default_rng(0)
        with Client.connect([self._endpoint], role=Role.WORKER) as client:
            client.attach(self._spec)
            while not self._over.is_set():
                keys = rng.integers(0, self._num_keys, self._num_rows).astype(np.uint64)
                start = time.perf_counter()
                client.pull(self._spec.name, keys, create=False).result()
                self.times.append(1000 * (time.perf_counter() - start))
