"""What a server's log costs, and how long a server takes to go on from it.

python -m benchmarks.durability --json                     pushes with the log and without, in turns; then recovery
python -m benchmarks.durability --folder /data --json      the same on another disk (default: shared memory)
python -m benchmarks.durability --fsync_ms 0 --json        every answer waits for the disk
python -m benchmarks.durability --quick --json             in seconds, to see that it works

Two servers run as processes of their own, one of them with a log. Two clients push to one and then to the other:
`push_ratio` is the rate with the log over the plain one. `cpu_ratio` is the processor time that a push takes of the
server, thread of the log included, over that of the plain one: it does not depend on who else uses the machine.
Recovery: rows are loaded into a table, updated by pushes, and the server is killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks.timing import log, report
from torchfleet.net.sockets import SocketChannel
from torchfleet.net.wire import Role
from torchfleet.server.process import ServerProcess
from torchfleet.tables.settings.spec import Rule, TableSpec
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.connection import Patience

NUM_CLIENTS = 2
WINDOW = 8  # pushes of a client under way


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durability", description=__doc__)
    parser.add_argument("--folder", default="/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    parser.add_argument("--fsync_ms", type=float, default=10.0)
    parser.add_argument("--keys", type=int, default=4096, help="of one push")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--pushes", type=int, default=300, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the table that is recovered")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    found = parser.parse_args()
    if found.quick:
        found.pushes, found.rounds, found.rows = 50, 2, 100_000
    return found


def spec_of(given: argparse.Namespace) -> TableSpec:
    return TableSpec("rows", dim=given.dim, rule=Rule("adagrad"))


class Loaded:
    """A server process with clients that push to it."""

    def __init__(self, given: argparse.Namespace, *arguments: str) -> None:
        self._given, self.server = given, ServerProcess("tcp://127.0.0.1:0", *arguments)
        self._process = psutil.Process(self.server.pid)
        dice = np.random.default_rng(0)
        self._batches = [
            (
                np.unique(dice.integers(0, 1 << 20, given.keys).astype(np.uint64)),
                dice.normal(size=(given.keys, given.dim)).astype(np.float32),
            )
            for _ in range(16)
        ]
        self._clients = [self._connect(number) for number in range(NUM_CLIENTS)]

    def _connect(self, number: int) -> Client:
        channel = SocketChannel(self.server.endpoint, None, Role.FIRST_WORKER)
        client = Client([channel], worker=number, patience=Patience(120.0, 3))
        client.create_table(spec_of(self._given))
        return client

    def round(self) -> tuple[float, float]:
        """(pushes per second, the server's processor time per push in microseconds)."""
        threads = [threading.Thread(target=self._push, args=(client,)) for client in self._clients]
        cpu, start = sum(self._process.cpu_times()[:2]), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        num = NUM_CLIENTS * self._given.pushes
        seconds = time.perf_counter() - start
        return num / seconds, (sum(self._process.cpu_times()[:2]) - cpu) / num * 1e6

    def _push(self, client: Client) -> None:
        for i in range(self._given.pushes):
            keys, grads = self._batches[i % len(self._batches)]
            client.push("rows", keys, grads[: len(keys)])
            if i % WINDOW == WINDOW - 1:
                client.flush()
        client.flush()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()


def cost(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    store = ("--durability", "log", "--log_store", str(folder / "cost"), "--fsync_ms", str(given.fsync_ms))
    servers = {"plain": Loaded(given), "log": Loaded(given, *store)}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    cpus: dict[str, list[float]] = {name: [] for name in servers}
    try:
        for server in servers.values():
            server.round()  # rows are made, kernels are warm
        for turn in range(given.rounds):
            for name, server in servers.items():
                per_second, cpu = server.round()
                rates[name].append(per_second)
                cpus[name].append(cpu)
            last = ", ".join(f"{name} {found[-1]:,.0f}" for name, found in rates.items())
            log(f"  round {turn + 1}/{given.rounds}: {last} pushes a second")
    finally:
        for server in servers.values():
            server.close()
    ratios = [log_rate / plain for log_rate, plain in zip(rates["log"], rates["plain"], strict=True)]
    return {
        "plain_pushes_per_s": statistics.median(rates["plain"]),
        "log_pushes_per_s": statistics.median(rates["log"]),
        "push_ratio": statistics.median(ratios),
        "plain_cpu_us": statistics.median(cpus["plain"]),
        "log_cpu_us": statistics.median(cpus["log"]),
        "cpu_ratio": statistics.median(cpus["log"]) / statistics.median(cpus["plain"]),
    }


def recovery(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """A server with so many rows is killed; how long the next one takes until it serves."""
    store = ("--durability", "log", "--log_store", str(folder / "recovery"), "--fsync_ms", str(given.fsync_ms))
    server = ServerProcess("tcp://127.0.0.1:0", *store)
    values = np.zeros((1 << 16, given.dim), np.float32)
    with Client([SocketChannel(server.endpoint, None, Role.FIRST_WORKER)], patience=Patience(120.0, 3)) as client:
        client.create_table(spec_of(given))
        for start in range(0, given.rows, len(values)):
            keys = np.arange(start, min(start + len(values), given.rows), dtype=np.uint64)
            client.push("rows", keys, values[: len(keys)])
        client.flush()
    num_bytes = _size(folder / "recovery")
    server.kill()
    server.close()
    empty = _seconds_to_start(())
    began = time.perf_counter()
    again = ServerProcess("tcp://127.0.0.1:0", *store, timeout=600.0)
    seconds = time.perf_counter() - began
    with Client([SocketChannel(again.endpoint)]) as client:
        num_rows = client.stats()[0]["tables"]["rows"]["rows"]
    again.close()
    assert num_rows == given.rows, (num_rows, given.rows)
    return {
        "recovered_rows": num_rows,
        "log_bytes": num_bytes,
        "recovery_s": seconds,
        "empty_start_s": empty,
        "recovery_s_per_million_rows": (seconds - empty) / (given.rows / 1e6),
    }


def _seconds_to_start(arguments: Sequence[str]) -> float:
    began = time.perf_counter()
    with ServerProcess("tcp://127.0.0.1:0", *arguments):
        return time.perf_counter() - began


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("segment*"))


def main() -> int:
    given = options()
    folder = Path(tempfile.mkdtemp(prefix="durability-", dir=given.folder))
    try:
        found = {**cost(given, folder), **recovery(given, folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {"keys": given.keys, "dim": given.dim, "fsync_ms": given.fsync_ms, "folder": given.folder}
    report({**settings, **found}, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
