"""What a server's log costs, and how long a server takes to go on from it.

python -m benchmarks.durability --json                        pushes with the log and without, in turns
python -m benchmarks.durability --folder /data --json         the same on another disk (default: shared memory)
python -m benchmarks.durability --fsync_ms 0 --json           every answer waits for the disk
python -m benchmarks.durability --recovery_rows 20000000      a server of this size recovers from its log
python -m benchmarks.durability --quick --json                in seconds, to see that it works

Two servers run as processes of their own, one of them with a log. Two clients push to one and then to the other:
`push_ratio` is the median over rounds of the rate with the log over the plain one. `loop_cpu_ratio` is the same of the
processor time that a push takes of the server's loop, which bounds it where cores are free; `writer_cpu_us` is what the
thread of the log takes beside it, for each push.

Recovery: rows are pushed, saved (which begins the log anew with a copy of them), a tenth of them is pushed again, and
the server is killed. `recovery_s` is the time until the next one serves, `empty_start_s` that of one without a log,
and `read_s` what merely reading the files of the log takes, out of the disk's cache as far as the system lets it go.
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
from pathlib import Path

import numpy as np

from benchmarks.recovery import recovery
from benchmarks.timing import log, report
from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

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
    parser.add_argument("--recovery_rows", type=int, metavar="N", help="recover a table of N rows, and nothing else")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    found = parser.parse_args()
    if found.quick:
        found.pushes, found.rounds = 50, 2
    return found


def spec_of(given: argparse.Namespace) -> TableSpec:
    return TableSpec("rows", dim=given.dim, rule=Rule("adagrad"))


class Loaded:
    """A server process with clients that push to it."""

    def __init__(self, given: argparse.Namespace, *arguments: str) -> None:
        self._given, self.server = given, ServerProcess("tcp://127.0.0.1:0", *arguments)
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

    def round(self) -> tuple[float, float, float]:
        """(pushes per second, processor time per push in microseconds: of the server's loop, of its other threads but
        ZeroMQ's)."""
        threads = [threading.Thread(target=self._push, args=(client,)) for client in self._clients]
        before, start = self._cpu(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        num = NUM_CLIENTS * self._given.pushes
        per_second = num / (time.perf_counter() - start)
        loop, others = (after - was for after, was in zip(self._cpu(), before, strict=True))
        return per_second, loop / num * 1e6, others / num * 1e6

    def _cpu(self) -> tuple[float, float]:
        """Seconds of processor time, of the loop's thread and of all others but ZeroMQ's."""
        loop = others = 0.0
        for task in Path(f"/proc/{self.server.pid}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            if int(task.name) == self.server.pid:
                loop += seconds
            elif not (task / "comm").read_text().startswith("ZMQ"):
                others += seconds
        return loop, others

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
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in servers}
    try:
        for server in servers.values():
            server.round()  # rows are made, kernels are warm
        for turn in range(given.rounds):
            for name, server in servers.items():
                rounds[name].append(server.round())
            last = ", ".join(f"{name} {found[-1][0]:,.0f}" for name, found in rounds.items())
            log(f"  round {turn + 1}/{given.rounds}: {last} pushes a second")
    finally:
        for server in servers.values():
            server.close()
    plain, logged = (list(zip(*rounds[name], strict=True)) for name in ("plain", "log"))
    ratios = [
        [with_log / without for without, with_log in zip(*pair, strict=True)]
        for pair in zip(plain[:2], logged[:2], strict=True)
    ]
    return {
        "plain_pushes_per_s": statistics.median(plain[0]),
        "log_pushes_per_s": statistics.median(logged[0]),
        "push_ratio": statistics.median(ratios[0]),
        "plain_loop_cpu_us": statistics.median(plain[1]),
        "log_loop_cpu_us": statistics.median(logged[1]),
        "loop_cpu_ratio": statistics.median(ratios[1]),
        "writer_cpu_us": statistics.median(logged[2]),
    }


def main() -> int:
    given = options()
    folder = Path(tempfile.mkdtemp(prefix="durability-", dir=given.folder))
    try:
        found = recovery(given, folder) if given.recovery_rows else cost(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings: dict[str, float | str] = {"fsync_ms": given.fsync_ms, "folder": given.folder}
    if not given.recovery_rows:
        settings |= {"keys": given.keys, "dim": given.dim}
    report({**settings, **found}, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
