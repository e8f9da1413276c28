"""Servers with rows on two tiers and a log are killed while they work: what was acknowledged is there afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from support.fleets import ForkedServer

from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

DIM, NUM_ROWS = 64, 140_000  # memory holds about 110,000 of the rows
NUM_PULLED, NUM_PUSHED = 20_000, 5_000  # rows of a request
NUM_KILLS = 100
SPEC = TableSpec("rows", dim=DIM, rule=Rule(lr=1.0), initializer=Initializer("constant", 0.0))


class Job:
    """A client's view: how often each row was pushed. A push takes 1 from every number of its rows."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._dice, self._counts = np.random.default_rng(seed), np.zeros(NUM_ROWS)
        self._grads = np.ones((NUM_PUSHED, DIM), np.float32)
        self._unsure = np.empty(0, np.int64)  # rows of a push whose answer was not awaited
        (folder / "cold").mkdir()
        self._options = ["--durability", "log", "--log_store", str(folder / "log")]
        self._options += ["--table_memory", "64MiB", "--table_path", str(folder / "cold")]
        self.num_cold = 0

    def live_and_die(self, num_pushes: int) -> None:
        """Start a server, compare all rows, which the first one creates, train, and kill it a moment after a push was
        sent.
        """
        server = ForkedServer("tcp://127.0.0.1:0", *self._options)
        with server, Client([SocketChannel(server.endpoint, None, Role.FIRST_WORKER)]) as client:
            client.create_table(SPEC)
            self._compare(client)
            for _ in range(num_pushes):
                rows = self._some()
                client.push("rows", rows.astype(np.uint64), self._grads).result()
                self._counts[rows] += 1
            self.num_cold = max(self.num_cold, client.stats()[0]["tables"]["rows"]["cold_rows"])
            self._unsure = self._some()
            client.push("rows", self._unsure.astype(np.uint64), self._grads)
            time.sleep(float(self._dice.uniform(0, 0.04)))
            server.kill()

    def _some(self) -> np.ndarray:
        chosen: np.ndarray = self._dice.choice(NUM_ROWS, NUM_PUSHED, replace=False)
        return chosen

    def _compare(self, client: Client) -> None:
        starts, is_first = range(0, NUM_ROWS, NUM_PULLED), not self._counts.any()
        keys = [np.arange(start, start + NUM_PULLED, dtype=np.uint64) for start in starts]
        found = np.concatenate([client.pull("rows", some, create=is_first).result() for some in keys])
        if len(self._unsure):  # all of it was applied, or nothing
            was_applied = found[self._unsure[0], 0] != -self._counts[self._unsure[0]]
            self._counts[self._unsure] += was_applied
        assert np.array_equal(found, np.repeat(-self._counts[:, None], DIM, axis=1).astype(np.float32))


@pytest.mark.long
def test_a_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    job = Job(tmp_path, 0)
    for _ in range(NUM_KILLS):
        job.live_and_die(2)
    job.live_and_die(0)
    assert job.num_cold > 20_000
