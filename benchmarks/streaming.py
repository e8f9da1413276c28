"""A stream of new keys without end through a table that may not grow: memory, speed, and what becomes of hot keys.

python -m benchmarks.streaming --json                200 million distinct keys, a budget of 2 GB: about seven minutes
python -m benchmarks.streaming --quick --json        smaller, to see that it works
python -m benchmarks.streaming --entry window        keys get a row at their second appearance, counted in fixed memory

A step pulls and pushes 26,000 keys, a tenth of them from 100,000 hot ones. All gradients are 1 and the rule is SGD: a
hot key that was never dropped has exactly the value that follows from its number of steps.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.timing import log, report
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink, WindowCountEntry
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

DIM = 16
BATCH = 26_000
HOT_SHARE = 0.1
RATE = 2.0**-10  # so that the sum of all steps is exact


@dataclass
class StreamState:
    """The state of the table after a tenth of the stream."""

    keys_per_s: float
    resident: int
    rows: int


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument("--keys", type=int, default=200_000_000, help="distinct keys")
    parser.add_argument("--budget", type=int, default=2 << 30, help="bytes of the table")
    parser.add_argument("--entry", choices=("none", "window"), default="none")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    chosen.hot = 100_000
    if chosen.quick:
        chosen.keys, chosen.budget, chosen.hot = 4_000_000, 96 << 20, 4_000
    return chosen


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    entry = WindowCountEntry(2, hours=24, max_bytes=64 << 20) if chosen.entry == "window" else AdmissionEntry()
    spec = TableSpec("rows", dim=DIM, rule=Rule("sgd", RATE), entry=entry, shrink=Shrink(max_bytes=chosen.budget))
    with ServerProcess() as process, Client.connect([process.endpoint]) as client:
        client.create_table(spec)
        stream = Stream(client, chosen.keys, chosen.hot)
        stream.warm_up()
        server = psutil.Process(process.pid)
        tenths = [stream.tenth(server, i) for i in range(10)]
        lost, wrong = stream.check_hot_keys()
        stats = client.stats()[0]["tables"]["rows"]
    return {
        "distinct_keys": stream.num_new,
        "keys_per_s": [round(tenth.keys_per_s) for tenth in tenths],
        "last_to_first": tenths[-1].keys_per_s / tenths[0].keys_per_s,
        "resident_max": max(tenth.resident for tenth in tenths),
        "resident_to_budget": max(tenth.resident for tenth in tenths) / chosen.budget,
        "rows": stats["rows"],
        "evicted": stats["evicted"],
        "hot_keys": chosen.hot,
        "hot_keys_lost": lost,
        "hot_keys_wrong": wrong,
    }


class Stream:
    """Steps of new and hot keys."""

    def __init__(self, client: Client, num_keys: int, num_hot: int) -> None:
        self._client, self._num_keys, self._num_hot = client, num_keys, num_hot
        self._rng = np.random.default_rng(1)
        self._hot: npt.NDArray[np.uint64] = np.arange(num_hot, dtype=np.uint64) + np.uint64(1 << 63)
        self._times = np.zeros(num_hot, np.int64)
        self._grads = np.ones((BATCH, DIM), np.float32)
        self.num_new = self._first = 0

    def warm_up(self) -> None:
        for _ in range(20):
            self._step()
        self._first = self.num_new

    def tenth(self, server: psutil.Process, number: int) -> StreamState:
        start, begun = time.perf_counter(), self.num_new
        resident = 0
        while self.num_new - self._first < self._num_keys * (number + 1) // 10:
            self._step()
            resident = max(resident, server.memory_info().rss)
        seconds = time.perf_counter() - start
        rows = self._client.stats()[0]["tables"]["rows"]["rows"]
        found = StreamState((self.num_new - begun) / (1 - HOT_SHARE) / seconds, resident, rows)
        log(f"  {self.num_new:>13,} keys: {found.keys_per_s:,.0f} keys/s, {rows:,} rows, {resident / 2**30:.2f} GiB")
        return found

    def check_hot_keys(self) -> tuple[int, int]:
        """(hot keys that have no row, hot keys whose value is not what they learned)."""
        wrong = lost = 0
        for start in range(0, self._num_hot, 20_000):
            values = self._client.pull("rows", self._hot[start : start + 20_000], create=False).result()[:, 0]
            expected = (-RATE * self._times[start : start + 20_000]).astype(np.float32)
            lost += int(((values == 0) & (expected != 0)).sum())
            wrong += int((values != expected).sum())
        return lost, wrong

    def _step(self) -> None:
        num_hot = int(BATCH * HOT_SHARE)
        chosen = self._rng.choice(self._num_hot, num_hot, replace=False)
        new = np.arange(self.num_new, self.num_new + BATCH - num_hot, dtype=np.uint64)
        keys = np.concatenate([self._hot[chosen], new])
        self._client.pull("rows", keys).result()
        self._client.push("rows", keys, self._grads).result()
        self._times[chosen] += 1
        self.num_new += len(new)


if __name__ == "__main__":
    arguments = options()
    log(f"{arguments.keys:,} distinct keys, a budget of {arguments.budget / 2**30:.2f} GiB, entry: {arguments.entry}")
    report(run(arguments), arguments.json)
