"""What a log and a backup cost in processor time, for pulls and pushes as training makes them.

    python -m benchmarks.server_costs --json                     plain, log, replicas and both, in turns
    python -m benchmarks.server_costs --ways plain log --folder /data
    python -m benchmarks.server_costs --quick --json             in seconds, to see that it works

Servers run as processes of their own, each way with its own, over sockets in a folder, as under fleetrun. Two clients
pull the rows of a batch and push gradients for them (Adam, dim 16, keys of 26 slots × 4096 samples on one of two
servers). The figures are microseconds of processor time for one pull with its push, the median over rounds in turns:
`loop` is the server's own thread, `zmq` those of ZeroMQ, `others` the log's threads, pyzmq's and the signs of life;
`system` is the part of all of them that was spent in the kernel, `switches` how often a thread went to sleep. What the
kernel's own threads spend on writing to a disk is not in them. `--pin`: the loop of the server, or of the primary, has
core 0, and all else has the other cores. Without it, on two cores, the backup and the clients take turns with the loop
on its core, and it finds its caches cold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import log, report
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

WAYS = ("plain", "log", "replicas", "both")
NUM_CLIENTS, NUM_BATCHES = 2, 8
SLOTS, BATCH, NUM_SERVERS, NUM_IDS, ZIPF = 26, 4096, 2, 10_000_000, 1.15
START = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")


def batches(dim: int, num_ids: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(distinct keys that one server has of a batch, gradients)."""
    cumulative = np.cumsum(1.0 / np.arange(1, num_ids + 1) ** ZIPF)
    dice, found = np.random.default_rng(0), []
    for _ in range(NUM_CLIENTS * NUM_BATCHES):
        ranks = np.unique(np.searchsorted(cumulative, dice.random(SLOTS * BATCH) * cumulative[-1]))
        keys = dice.permutation(ranks[ranks % NUM_SERVERS == 0]).astype(np.uint64)
        found.append((keys, dice.normal(0, 0.01, (len(keys), dim)).astype(np.float32)))
    return found


class Servers:
    """The processes of one way, and clients that train with them."""

    def __init__(self, way: str, folder: Path, given: argparse.Namespace) -> None:
        self._given, self._folder = given, folder / way
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder.mkdir()
        self._server: ServerProcess | None = None
        store = ("--durability", "log", "--log_store", str(self._folder / "store")) if way == "log" else ()
        if way in ("plain", "log"):
            self._server = ServerProcess(f"ipc://{self._folder}/socket", *store)
            self.pids, endpoint = {"server": self._server.pid}, self._server.endpoint
        else:
            endpoint = self._start_replicas(way == "both")
        self._clients = [Client.connect([endpoint], worker=i, patience=Patience(60.0, 5)) for i in range(NUM_CLIENTS)]
        self._make_table()
        if way in ("replicas", "both"):
            self._name_replicas()
        if given.pin:
            pin(list(self.pids.values()))

    def _start_replicas(self, has_log: bool) -> str:
        places = [f"ipc://{self._folder}/socket{i}" for i in range(2)]
        self._url = f"file://{self._folder}/views"
        (self._folder / "views").mkdir(mode=0o700)
        store = ["--log_store", str(self._folder / "store")] if has_log else []
        for replica in range(2):
            options = ["--places", "|".join(places), "--replica", str(replica), "--coordinator", self._url, *store]
            command = [sys.executable, "-m", "benchmarks.takeover_server", *options]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        return "|".join(places)

    def _name_replicas(self) -> None:
        """Wait until the view names a backup."""
        coordinator, deadline = make_coordinator(self._url), time.monotonic() + START
        while (view := coordinator.read(0)) is None or not view.backup:
            if time.monotonic() > deadline:
                raise SystemExit(f"no backup after {START:g} s")
            time.sleep(0.05)
        first = int(view.primary.partition(".")[0])
        self.pids = {"primary": self._processes[first].pid, "backup": self._processes[1 - first].pid}

    def _make_table(self) -> None:
        deadline = time.monotonic() + START
        for client in self._clients:
            while client.unready(1.0) and time.monotonic() < deadline:
                time.sleep(0.05)
            rule, first = Rule("adam", lr=1e-3), Initializer("uniform", -0.01, 0.01)
            client.create_table(TableSpec("rows", dim=self._given.dim, rule=rule, initializer=first))

    def round(self, data: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, dict[str, float]]:
        """Microseconds for each batch, by process and part."""
        before = {name: spent(pid) for name, pid in self.pids.items()}
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=self._train, args=(client, data[i::NUM_CLIENTS], errors))
            for i, client in enumerate(self._clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        num = NUM_CLIENTS * self._given.batches
        return {
            name: {part: (value - before[name][part]) / num for part, value in spent(pid).items()}
            for name, pid in self.pids.items()
        }

    def _train(self, client: Client, data: list[tuple[np.ndarray, np.ndarray]], errors: list[BaseException]) -> None:
        try:
            for i in range(self._given.batches):
                keys, grads = data[i % len(data)]
                client.pull("rows", keys).result()
                client.push("rows", keys, grads)
            client.flush()
        except BaseException as error:
            errors.append(error)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self._server is not None:
            self._server.close()
        for process in self._processes:
            process.kill()
            process.wait()


def pin(pids: list[int]) -> None:
    """Core 0 for the loop of the first process; the others for its other threads, the other processes and this one."""
    rest = os.sched_getaffinity(0) - {0}
    for pid in (os.getpid(), *pids):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {0} if int(task.name) == pids[0] else rest)


def spent(pid: int) -> dict[str, float]:
    """Microseconds of processor time of a process by part, and how often its threads went to sleep."""
    found = dict.fromkeys(("loop", "zmq", "others", "all", "system", "switches"), 0.0)
    for task in Path(f"/proc/{pid}/task").iterdir():
        micros = int((task / "schedstat").read_text().split()[0]) / 1e3
        is_zmq = (task / "comm").read_text().startswith("ZMQ")
        found["loop" if int(task.name) == pid else "zmq" if is_zmq else "others"] += micros
        found["all"] += micros
        found["system"] += int((task / "stat").read_text().rpartition(")")[2].split()[12]) * 1e6 / _TICKS
        status = (task / "status").read_text()
        found["switches"] += float(status.partition("\nvoluntary_ctxt_switches:")[2].split(None, 1)[0])
    return found


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    data = batches(given.dim, given.num_ids)
    ways = {way: Servers(way, folder, given) for way in given.ways}
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {way: [] for way in ways}
    try:
        for servers in ways.values():
            servers.round(data)  # rows are made, kernels are warm
        for turn in range(given.rounds):
            for way, servers in ways.items():
                rounds[way].append(servers.round(data))
                sums = ", ".join(f"{name} {parts['all']:,.0f}" for name, parts in rounds[way][-1].items())
                log(f"  round {turn + 1}/{given.rounds}, {way}: {sums} us")
    finally:
        for servers in ways.values():
            servers.close()
    result: dict[str, Any] = {"keys": int(np.mean([len(keys) for keys, _ in data]))}
    for way, found in rounds.items():
        result[way] = {
            name: {part: round(statistics.median(each[name][part] for each in found), 1) for part in found[0][name]}
            for name in found[0]
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of logs and sockets")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--num_ids", type=int, default=NUM_IDS)
    parser.add_argument("--batches", type=int, default=150, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pin", action="store_true", help="the loop that is measured has a core of its own")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = parser.parse_args()
    if given.quick:
        given.num_ids, given.batches, given.rounds = 100_000, 20, 1
    folder = Path(tempfile.mkdtemp(prefix="costs-", dir=given.folder))
    try:
        report(measure(given, folder), given.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
